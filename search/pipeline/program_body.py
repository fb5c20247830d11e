"""The ops of one program of a pipeline, with those that it computes itself instead of reading their results."""

from collections.abc import Callable, Iterable

from autoshard.search.ir.graph import Op
from autoshard.search.pipeline.pipeline_step import PipelineStep


class ProgramBody:
    """The ops of a program, those included whose results it makes anew.

    Attributes:
      ops: all ops, in an order in which they can run.
      entering: the values that they read and do not make.
      constants: the constants that they read.
    """

    def __init__(
        self, step: PipelineStep, ops: Iterable[Op], anew: Iterable[int], makes_anew: Callable[[int], bool]
    ) -> None:
        """Puts the ops of a program in order.

        Args:
          step: the step in parts.
          ops: the program's own ops, in order.
          anew: values that the program makes anew, whether its ops read them or not.
          makes_anew: whether it makes a value anew that its ops read.
        """
        self._step, self._makes_anew = step, makes_anew
        self._constants = {v for v, _ in step.constants}
        self.ops: list[Op] = []
        self.entering: dict[int, None] = {}
        self.constants: set[int] = set()
        self._there: set[int] = set()
        for op in ops:
            self._append(op)
        for v in anew:
            self._read(v)

    def _append(self, op: Op) -> None:
        for v in op.operands:
            self._read(v)
        self.ops.append(op)
        self._there.update(op.outputs)

    def _read(self, v: int) -> None:
        if v in self._there:
            return
        if v in self._constants:
            self.constants.add(v)
        elif self._makes_anew(v):
            self._append(self._step.maker[v])
        else:
            self.entering[v] = None
            self._there.add(v)
