"""The kernels of blockwise attention on one device, as XLA:GPU compiles its loops.

Two loops, over blocks of queries and over blocks of keys, look at every pair of blocks. Before a pair can be skipped, the
host must know that the mask hides all of it. So the price has three parts:

    for each block of queries   its queries are cut out of the stack, its sums begin, and are put back into the stack
    for each pair of blocks     keys and values are cut out; under a mask, a few small kernels make the predicate, which the
                                host reads before it launches anything else (`ConditionalThunk` in XLA)
    for each pair that is seen  products, and the kernels between them, which write scores to memory and read them again

No kernel reaches over an iteration of a loop: sums of rows and columns are read and written in each pair that is seen. Each
product is priced as every other one (`cost_model.compute`), and no kernel is shorter than its launch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from autoshard.cost_model.cluster import Cluster, Device
from autoshard.cost_model.compute import Product, kernel_s, product_s
from autoshard.search.ir.attention.op import BACKWARD, FORWARD

SMALL_IN_PAIR: Mapping[str, int] = MappingProxyType({FORWARD: 8, BACKWARD: 7})
"""Kernels of a pair of blocks under a mask, besides the slices of keys and values: positions, predicate, counter, copies.
Source: XLA:GPU, JAX 0.12, programs of `tests/gpu/test_attention_blocks.py`, also for the constants below."""

SMALL_UNMASKED = 1
"""Such kernels where there is no mask: the counter."""

SMALL_IN_SEEN: Mapping[str, int] = MappingProxyType({FORWARD: 2, BACKWARD: 0})
"""Kernels of a pair that is seen that handle one number a row: the largest score, and the sum of exponentials."""

SMALL_IN_ROW: Mapping[str, int] = MappingProxyType({FORWARD: 8, BACKWARD: 5})
"""Kernels of a block of queries that handle one number a row, or positions."""

GRADIENT_COPIES = 2
"""Times that a kernel of the backward pass writes what is as large as the scores: probabilities for the values' gradient,
and the gradient of scores for the queries' and the keys'."""

SUM_PASSES: Mapping[str, int] = MappingProxyType({FORWARD: 6, BACKWARD: 5})
"""Times that the sums of a block of queries are written or read outside of pairs: the stack's zeros and the block's, the
block's result read and put into the stack (read and written by some), and the stack read for the result."""

WRITTEN_PASSES: Mapping[str, tuple[int, int]] = MappingProxyType({FORWARD: (2, 2), BACKWARD: (2, 5)})
"""Times that attention as it is written reads or writes a score between its products, in the operands' dtype and in the
softmax's: of a softmax, the maximum, the sum, and the exponentials; of its gradient, a transposed copy, the sum, and the
gradient of scores. Only for an estimate."""


@dataclass(frozen=True, slots=True)
class BlockLoops:
    """The loops of one attention on one device.

    Attributes:
      name: `FORWARD` or `BACKWARD`.
      batch: heads of keys, of all examples.
      group: query heads that share one of keys.
      rows: queries in a block.
      columns: keys in a block.
      channels: of queries and keys.
      value_channels: of values.
      itemsize: bytes of an element of operands.
      sum_itemsize: bytes of an element of a sum.
      num_rows: runs of the loop over blocks of queries, in all steps of a ring.
      num_pairs: pairs of blocks.
      num_seen: pairs of which the mask hides not all.
      is_masked: whether a pair can be skipped.
    """

    name: str
    batch: int
    group: int
    rows: int
    columns: int
    channels: int
    value_channels: int
    itemsize: int
    sum_itemsize: int
    num_rows: int
    num_pairs: int
    num_seen: float
    is_masked: bool

    def seconds(self, cluster: Cluster, peak_flops_per_s: float) -> float:
        """Seconds of all loops.

        Args:
          cluster: whose devices run them.
          peak_flops_per_s: peak of matrix products in the operands' dtype.
        """
        device = cluster.device
        seen_s = self._products_s(device, peak_flops_per_s) + self._between_s(device)
        row_s, pair_s = self._row_s(device), self._pair_s(cluster)
        return self.num_rows * row_s + self.num_pairs * pair_s + self.num_seen * seen_s

    def written_s(self, device: Device, peak_flops_per_s: float, softmax_itemsize: int) -> float:
        """An estimate of the time of the attention as it is written, with all scores in memory, if there is no ring.

        Args:
          peak_flops_per_s: peak of matrix products in the operands' dtype.
          softmax_itemsize: bytes of an element of the softmax.
        """
        length = self.num_rows * self.rows
        whole = replace(self, rows=length, columns=length, sum_itemsize=self.itemsize)
        products = whole._forward() if self.name == FORWARD else islice(whole._backward(), 1, None)
        narrow, wide = WRITTEN_PASSES[self.name]
        score_bytes = narrow * self.itemsize + wide * softmax_itemsize
        scores_s = float(kernel_s(device, score_bytes * whole.num_scores))
        return scores_s + sum(
            float(product_s(device, product, num_bytes, peak_flops_per_s)) for product, num_bytes in products
        )

    @property
    def num_scores(self) -> int:
        """Scores in a pair of blocks."""
        return self.batch * self.group * self.rows * self.columns

    @property
    def held_bytes(self) -> float:
        """Bytes of scores that are in memory together: in the forward pass, scores and their exponentials; in the backward
        pass, probabilities and their gradient before and after the kernel between the products. None takes another's
        place (XLA:GPU, programs of `tests/gpu/test_attention_blocks.py`)."""
        sums, copies = (1, 1) if self.name == FORWARD else (2, GRADIENT_COPIES)
        return self.num_scores * (sums * self.sum_itemsize + copies * self.itemsize)

    @property
    def _queries(self) -> int:
        """Elements of a block of queries, with one channel."""
        return self.batch * self.group * self.rows

    @property
    def _keys(self) -> int:
        """Elements of a block of keys, with one channel."""
        return self.batch * self.columns

    @property
    def moved_bytes(self) -> float:
        """Bytes that the kernels of a pair that is seen write and read."""
        return sum(num_bytes for _, num_bytes in self._products()) + sum(self._between())

    def _products_s(self, device: Device, peak_flops_per_s: float) -> float:
        return sum(
            float(product_s(device, product, num_bytes, peak_flops_per_s))
            for product, num_bytes in self._products()
        )

    def _products(self) -> Iterator[tuple[Product, float]]:
        """The matrix products of a pair that is seen, with the bytes that each moves."""
        return self._forward() if self.name == FORWARD else self._backward()

    def _forward(self) -> Iterator[tuple[Product, float]]:
        """Scores; then the weighted sum of values, which is added to what there is."""
        yield self._scores(self.channels)
        yield self._of_rows(self.value_channels)

    def _backward(self) -> Iterator[tuple[Product, float]]:
        """Scores, and the gradient of probabilities; then the gradients of queries, keys and values, which are added."""
        yield self._scores(self.channels)
        yield self._scores(self.value_channels)
        yield self._of_rows(self.channels)
        yield self._of_columns(self.channels)
        yield self._of_columns(self.value_channels)

    def _scores(self, channels: int) -> tuple[Product, float]:
        read = channels * (self._queries + self._keys) * self.itemsize
        product = Product(self.batch, self.group * self.rows, self.columns, channels)
        return product, read + self.num_scores * self.sum_itemsize

    def _of_rows(self, channels: int) -> tuple[Product, float]:
        read = (self.num_scores + channels * self._keys) * self.itemsize
        product = Product(self.batch, self.group * self.rows, channels, self.columns)
        return product, read + 2 * channels * self._queries * self.sum_itemsize

    def _of_columns(self, channels: int) -> tuple[Product, float]:
        read = (self.num_scores + channels * self._queries) * self.itemsize
        product = Product(self.batch, self.columns, channels, self.group * self.rows)
        return product, read + 2 * channels * self._keys * self.sum_itemsize

    def _between_s(self, device: Device) -> float:
        """Seconds of the kernels between the products of a pair that is seen."""
        small_s = SMALL_IN_SEEN[self.name] * device.launch_s
        return small_s + sum(float(kernel_s(device, num_bytes)) for num_bytes in self._between())

    def _between(self) -> Iterator[float]:
        """The bytes that these kernels move, if they are large."""
        scores, sums = self.num_scores, self.sum_itemsize
        if self.name == FORWARD:
            yield scores * sums  # the largest
            yield scores * (sums + self.itemsize)  # the exponentials
            yield 2 * self.value_channels * self._queries * sums  # what there is, scaled down
        else:
            yield scores * (2 * sums + GRADIENT_COPIES * self.itemsize)
            for channels in (
                self.channels,
                self.value_channels,
            ):  # the columns' sums, out of the stack and back
                yield from 2 * [2 * channels * self._keys * sums]

    def _pair_s(self, cluster: Cluster) -> float:
        """Seconds of a pair of blocks, seen or not."""
        device = cluster.device
        cut = (2 * n * self._keys * self.itemsize for n in (self.channels, self.value_channels))
        small = SMALL_IN_PAIR[self.name] if self.is_masked else SMALL_UNMASKED
        waited_s = float(cluster.host_link.copy_s(1)) + device.launch_s if self.is_masked else 0.0
        return (
            sum(float(kernel_s(device, num_bytes)) for num_bytes in cut) + small * device.launch_s + waited_s
        )

    def _row_s(self, device: Device) -> float:
        """Seconds of a block of queries, besides its pairs."""
        read = (self.channels,) if self.name == FORWARD else (self.channels, self.value_channels)
        cut = (2 * n * self._queries * self.itemsize for n in read)
        channels = self.value_channels if self.name == FORWARD else self.channels
        sums = SUM_PASSES[self.name] * channels * self._queries * self.sum_itemsize
        moved = sum(float(kernel_s(device, num_bytes)) for num_bytes in (*cut, sums))
        return moved + SMALL_IN_ROW[self.name] * device.launch_s
