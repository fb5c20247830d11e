"""The ring of devices that split a sequence, and the order of pieces that balances their work.

A causal mask makes work unequal: the last part of a sequence sees all keys, the first part only its own. So the sequence is
cut in twice as many pieces as there are devices, and a device takes one piece from the front and its counterpart from the
back (zigzag; Brandon et al., "Striped Attention", 2023, has the same aim). Pieces change places in two permutations before
the ring, and change back behind it.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.search.ir.attention.scores import Scores

SAMPLES, MIN_SAMPLES = 256, 8
"""Places of a sequence, and at least of a piece, at which a mask is sampled. Source: a part of a hundred of the work of a
causal mask."""


def num_samples(num_pieces: int) -> int:
    """Places of a piece at which a mask is sampled."""
    return max(MIN_SAMPLES, SAMPLES // num_pieces)


@dataclass(frozen=True)
class Ring:
    """The devices that split a sequence: the axes, their number, and whether pieces are dealt out in zigzag."""

    axes: tuple[str, ...] = ()
    size: int = 1
    is_zigzag: bool = False

    @property
    def place(self) -> Any:
        """This device's place in the ring."""
        return lax.axis_index(self.axes) if self.size > 1 else 0

    def sent_on(self, arrays: Any) -> Any:
        """Arrays from the device before."""
        permutation = [(n, (n + 1) % self.size) for n in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, permutation), arrays)

    def dealt(self, x: Any, dim: int) -> Any:
        """A device's pieces of the zigzag, from its part of the sequence."""
        return self._exchanged(x, dim, self._piece_owners()) if self.is_zigzag else x

    def collected(self, x: Any, dim: int) -> Any:
        """A device's part of the sequence, from its pieces of the zigzag."""
        if not self.is_zigzag:
            return x
        backwards = [[(b, a) for a, b in permutation] for permutation in self._piece_owners()]
        return self._exchanged(x, dim, backwards)

    @property
    def num_exchanges(self) -> int:
        """How many of the zigzag's two permutations take pieces to other devices. Of two devices, each keeps its even
        piece."""
        owners = self._piece_owners() if self.is_zigzag else []
        return sum(any(a != b for a, b in permutation) for permutation in owners)

    def _piece_owners(self) -> list[list[tuple[int, int]]]:
        """Where the even and the odd pieces of each device go."""
        last = 2 * self.size - 1
        return [[(n, min(2 * n + k, last - 2 * n - k)) for n in range(self.size)] for k in (0, 1)]

    def _exchanged(self, x: Any, dim: int, permutations: Sequence[list[tuple[int, int]]]) -> Any:
        halves = jnp.split(x, 2, dim)
        sent = [lax.ppermute(h, self.axes, p) for h, p in zip(halves, permutations, strict=True)]
        return jnp.concatenate(sent, dim)

    def positions(self, place: Any, num_local: int) -> Any:
        """The positions in the whole sequence of what the device at a place has."""
        if not self.is_zigzag:
            return place * num_local + jnp.arange(num_local)
        half, last = num_local // 2, 2 * self.size - 1
        first, second = place, last - place
        is_odd = place % 2 == 1
        even, odd = jnp.where(is_odd, second, first), jnp.where(is_odd, first, second)
        return jnp.concatenate([even * half + jnp.arange(half), odd * half + jnp.arange(half)])


ALONE = Ring()


@lru_cache(maxsize=256)
def work_shares(scores: Scores, num_devices: int, length: int) -> tuple[float, float]:
    """The share of all blocks that the busiest device computes: with parts in order, and in zigzag.

    The mask is sampled at some places of each of the pieces. If it depends on more than positions, no block is known to
    be skipped.
    """
    num_pieces = 2 * num_devices
    num = num_samples(num_pieces)
    seen = np.full((num_pieces, num_pieces), 1.0 / num_pieces**2)
    at = np.linspace(0, length - 1, num_pieces * num).astype(int)
    if length >= num_pieces and (hidden := scores.sampled(at)) is not None:
        seen *= 1.0 - hidden.reshape(num_pieces, num, num_pieces, num).mean((1, 3))
    of_piece = seen.sum(1)
    in_order = of_piece.reshape(num_devices, 2).sum(1)
    in_zigzag = of_piece[:num_devices] + of_piece[::-1][:num_devices]
    return float(in_order.max()), float(in_zigzag.max())


@lru_cache(maxsize=256)
def seen_share(scores: Scores, ring: Ring, length: int, block: int) -> float:
    """The share of all pairs of blocks that a ring's busiest device computes: those of which the mask does not hide all.

    A mask is sampled at the corners of some blocks of each piece of the sequence.

    Args:
      scores: the softmax's argument.
      ring: the devices that split the sequence.
      length: of the sequence.
      block: positions in a block. A device's pieces have whole blocks.
    """
    num_pieces = ring.size * (2 if ring.is_zigzag else 1)
    of_piece = length // num_pieces // block
    num = min(of_piece, num_samples(num_pieces))
    places = np.linspace(0, of_piece - 1, num).astype(int)
    first = block * (of_piece * np.arange(num_pieces)[:, None] + places).reshape(-1, 1)
    hidden = scores.sampled((first + np.array([0, block - 1])).ravel())
    if hidden is None:
        return 1.0 / ring.size
    seen = ~hidden.reshape(num_pieces * num, 2, num_pieces * num, 2).all((1, 3))
    of_pieces = seen.mean(1).reshape(num_pieces, num).mean(1) / num_pieces
    own = of_pieces[: ring.size] + of_pieces[::-1][: ring.size] if ring.is_zigzag else of_pieces
    return float(own.max())


def ring_over(scores: Scores, axes: Sequence[str], num_devices: int, length: int) -> Ring:
    """The ring of the devices that split a sequence, in zigzag where that is less work for the busiest."""
    if num_devices == 1:
        return ALONE
    in_order, in_zigzag = work_shares(scores, num_devices, length)
    is_zigzag = in_zigzag < in_order and length % (2 * num_devices) == 0
    return Ring(tuple(axes), num_devices, is_zigzag)
