"""One attention of a graph, as far as it is recognised."""

from dataclasses import dataclass, field

from autoshard.search.ir.attention.scores import Scores
from autoshard.search.ir.graph import Graph
from autoshard.search.memory.attention.names import Name, Names, Shape


@dataclass(eq=False)
class Region:
    """One attention of a graph, as far as it is recognised. Values are numbers of the graph's values, ops their indices.

    Attributes:
      names: the labels of its dimensions.
      product: the op that makes the scores.
      query: the queries, `key` the keys, each as the product reads it, with their dimensions.
      scores_shape: the dimensions of the scores.
      row: the label of queries' positions; `column` that of keys'.
      scale: the derivative of the softmax's argument, where no mask hides it.
      scores: the softmax's argument.
      operands: what it reads, with their dimensions.
      exponential: the op that makes the exponentials.
      value: the values, as their product with the probabilities reads them; `value_shape` their dimensions.
      output: the op that makes the output, with its dimensions; None if the graph does not compute it.
      seen: the gradient of the output, and `seen_shape` its dimensions.
      gradients: by kind, the op that makes a gradient, with its dimensions.
      inside: all its ops but those of the backward products.
    """

    names: Names
    product: int
    query: int
    key: int
    query_shape: Shape = ()
    key_shape: Shape = ()
    scores_shape: Shape = ()
    row: Name = -1
    column: Name = -1
    scale: float = 1.0
    scores: Scores | None = None
    operands: list[tuple[int, Shape]] = field(default_factory=list[tuple[int, Shape]])
    exponential: int = -1
    value: int | None = None
    value_shape: Shape = ()
    output: tuple[int, Shape] | None = None
    seen: int | None = None
    seen_shape: Shape = ()
    gradients: dict[str, tuple[int, Shape]] = field(default_factory=dict[str, tuple[int, Shape]])
    inside: set[int] = field(default_factory=set[int])

    def inside_values(self, graph: Graph) -> set[int]:
        """The values that its ops make, other than its output."""
        output = self.output[0] if self.output else -1
        return {v for i in self.inside if i != output for v in graph.ops[i].outputs}
