"""A step with the plan's specs written into it.

JAX's tracer evaluates the graph op by op, so the result is an ordinary function to jit. At the places that the sharding
names, `with_sharding_constraint` imposes a spec. Everything else stays as the user wrote it: the plan changes numbers
only by the order of sums. XLA's partitioner turns the constraints into the planned collectives.

The compiler must not merge a copy that the backward phase makes for itself (a gathered weight that was not kept) with the
forward phase's. The source of the copy passes an `optimization_barrier` that also takes an incoming gradient: without
that tie the compiler hoists the copy (measured on XLA:GPU).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.executors.bad_values import located
from autoshard.executors.kernels import on_shards, reductions, sum_of_terms, terms_one_after_another
from autoshard.search.ir._jax import abstract_value, bind, optimization_barrier_p, provenance, with_weak_type
from autoshard.search.ir.graph import Graph, Op, Phase, Value
from autoshard.search.ir.sharding import OperandReshard, ReshardStep, SharedPaths, StepSharding
from autoshard.search.ir.spec import PARTIAL, WHOLE, Spec, partition_spec


def evaluator(
    graph: Graph, sharding: StepSharding, mesh: Mesh | AbstractMesh, path: tuple[Any, ...] = ()
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function of the graph's flat inputs that computes its flat outputs under the sharding's constraints.

    Args:
      graph: the graph to evaluate.
      sharding: the specs to impose, by place.
      mesh: devices, real, simulated or compile-only, with the sharding's axes; or only the axes.
      path: the path of the graph in the graph that the sharding is for.
    """

    def evaluate(inputs: Sequence[Any]) -> list[Any]:
        return _Evaluation(graph, sharding, mesh, path).run([with_weak_type(x, False) for x in inputs])

    return evaluate


_NOTHING = np.zeros(())
"""A scalar in place of an operand for which a barrier must not wait."""


@dataclass(eq=False)
class _Evaluation:
    """One walk over one graph (the step's, or a loop's body)."""

    graph: Graph
    sharding: StepSharding
    mesh: Mesh | AbstractMesh
    path: tuple[Any, ...]
    env: dict[int, Any] = field(default_factory=dict)
    shared: SharedPaths[Any] = field(default_factory=SharedPaths)
    made_backward: set[int] = field(default_factory=set)
    last_backward: Any = None
    terms: dict[int, Any] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        for i, (v, x) in enumerate(zip(self.graph.inputs, inputs, strict=True)):
            entered = self.sharding.reshards.get(("enter", self.path, i), OperandReshard(()))
            x = functools.reduce(self._taken, entered.path, x)
            self.env[v] = self._placed(v, x, ("input", self.path, i))
        self.env.update(self.graph.constants)
        for i, op in enumerate(self.graph.ops):
            site = (*self.path, i)
            operands = [self._read(a, ("operand", site, n), op) for n, a in enumerate(op.inputs)]
            if op.primitive is optimization_barrier_p:
                operands = self._waited_for(op, operands)
            results = self._found(op, operands, site)
            is_summed = self._is_on_shards(op, site)
            for r, (v, x) in enumerate(zip(op.outputs, results, strict=True)):
                self.env[v] = self._placed(v, x, ("result", site, r), is_summed)
                if self.sharding.specs.get(("terms", site, r)) == ():
                    self.terms[v] = _NOTHING
                if op.phase is Phase.BACKWARD and getattr(x, "ndim", 0) and v in self._read_as_they_are:
                    self.made_backward.add(v)
                    self.last_backward = self.env[v]
        return [self._read(a, ("output", self.path, i), None) for i, a in enumerate(self.graph.outputs)]

    def _found(self, op: Op, operands: list[Any], site: tuple[Any, ...]) -> list[Any]:
        """An op's results; where JAX runs it alone to find a bad value, an error names its line."""
        try:
            with provenance(op.scope, op.source_info):
                return self._applied(op, operands, site)
        except FloatingPointError as e:
            raise located(e, op.source_info, op.primitive, operands, self._params(op, site)) from None

    def _applied(self, op: Op, operands: list[Any], site: tuple[Any, ...]) -> list[Any]:
        if not self._is_on_shards(op, site):
            return bind(op.primitive, operands, self._params(op, site))
        inputs = [self.graph.value(a) for a in op.inputs]
        read, made = self._shards("operand", site, inputs), self._shards("result", site, op.result_values)
        names = self.sharding.axis_names
        waited = [r for r in range(len(made)) if self.sharding.specs.get(("terms", site, r))]
        specs = [self._spelled(way[0]) for way in read], [self._spelled(way[-1]) for way in made]
        for r in waited:
            specs[1][r] = terms_one_after_another(made[r][-1], names)
        sums = [reductions(way, names) for way in made]
        results = on_shards(op, inputs, operands, specs, sums, self.mesh)
        for r in waited:
            self.terms[op.outputs[r]] = results[r]
            results[r] = sum_of_terms(results[r], op.result_values[r].shape)
        return results

    def _waited_for(self, op: Op, operands: list[Any]) -> list[Any]:
        """A barrier's operands. If nothing reads an operand behind the barrier, the devices' terms replace their sum."""
        is_dead = [out not in self._read_anywhere for out in op.outputs]
        there = zip(op.inputs, is_dead, operands, strict=True)
        return [self.terms.get(a, x) if dead and isinstance(a, int) else x for a, dead, x in there]

    @functools.cached_property
    def _read_anywhere(self) -> frozenset[int]:
        read = frozenset(v for op in self.graph.ops for v in op.operands)
        return read.union(self.graph.made)

    @functools.cached_property
    def _read_as_they_are(self) -> frozenset[int]:
        """Values that some op reads without a reshard. A gradient of which every reader takes a part is none of them: as
        a tie, it would be summed up whole."""
        places = (
            (a, ("operand", (*self.path, i), n))
            for i, op in enumerate(self.graph.ops)
            for n, a in enumerate(op.inputs)
        )
        return frozenset(
            a for a, place in places if isinstance(a, int) and place not in self.sharding.reshards
        )

    def _is_on_shards(self, op: Op, site: tuple[Any, ...]) -> bool:
        """Whether an op is applied shard by shard: then the sharding names the specs of its operands."""
        return any(("operand", site, n) in self.sharding.specs for n in range(len(op.inputs)))

    def _shards(self, what: str, site: tuple[Any, ...], values: Sequence[Value]) -> list[tuple[Spec, ...]]:
        """The specs of the operands or results of an op that is applied shard by shard, until their terms are summed."""
        whole = ((WHOLE,) * len(self.sharding.mesh_shape),)
        return [_until_summed(self.sharding.specs.get((what, site, n), whole)) for n in range(len(values))]

    def _spelled(self, spec: Spec) -> PartitionSpec:
        return partition_spec(spec, self.sharding.axis_names)

    def _params(self, op: Op, site: tuple[Any, ...]) -> dict[str, Any]:
        """The op's parameters, with rewritten bodies."""
        if not op.bodies:
            return op.params
        inner = {
            key: tuple(self._body(b, (*site, key, j)) for j, b in enumerate(bodies))
            for key, bodies in op.bodies.items()
        }
        one = {
            key: jaxprs if isinstance(op.params[key], tuple | list) else jaxprs[0]
            for key, jaxprs in inner.items()
        }
        return {**op.params, **one}

    def _body(self, body: Graph, path: tuple[Any, ...]) -> Any:
        shapes = [body.values[v] for v in body.inputs]
        abstract = [abstract_value(v.shape, v.dtype) for v in shapes]
        return jax.make_jaxpr(lambda *xs: _Evaluation(body, self.sharding, self.mesh, path).run(xs))(
            *abstract
        )

    def _placed(self, v: int, x: Any, place: Any, is_summed: bool = False) -> Any:
        if self.graph.values[v].is_on_host:  # a constraint would take it to the device
            return x
        specs = self.sharding.specs.get(place, ())
        for spec in specs[len(_until_summed(specs)) - 1 :] if is_summed and specs else specs:
            x = self._constrained(x, spec)
        return x

    def _read(self, atom: Any, place: Any, op: Op | None) -> Any:
        if not isinstance(atom, int):
            return atom.val
        reshard = self.sharding.reshards.get(place)
        if reshard is None:
            return self.env[atom]
        return self.shared.arrive(atom, reshard, lambda: self._start(atom, reshard, op), self._taken)

    def _start(self, v: int, reshard: OperandReshard, op: Op | None) -> Any:
        """The value. Where a phase makes its own copy, the value waits for a gradient. A value that was widened is
        converted again behind the barrier, so that the compiler can move it in the narrower type."""
        tie = self._incoming(v, op) if reshard.phase else None
        if tie is None:
            return self.env[v]
        at = self._widenings.get(v)
        if at is None:
            return jax.lax.optimization_barrier((self.env[v], tie))[0]
        op, site = self.graph.ops[at], (*self.path, at)
        held, _ = jax.lax.optimization_barrier((self._read(op.inputs[0], ("operand", site, 0), op), tie))
        (x,) = bind(op.primitive, [held], op.params)
        return self._placed(v, x, ("result", site, 0))

    @functools.cached_property
    def _widenings(self) -> dict[int, int]:
        """By value, the number of the op that converts a narrower one to it."""
        of_one = (
            (i, op) for i, op in enumerate(self.graph.ops) if op.primitive is jax.lax.convert_element_type_p
        )
        wider = ((i, op) for i, op in of_one if op.operands and self._widens(op))
        return {op.outputs[0]: i for i, op in wider}

    def _widens(self, op: Op) -> bool:
        return self.graph.value(op.inputs[0]).itemsize < op.result_values[0].itemsize

    def _incoming(self, v: int, op: Op | None) -> Any:
        """A gradient among the operands of the copy's first reader, or else the latest gradient."""
        own = [a for a in (op.operands if op is not None else ()) if a != v and a in self.made_backward]
        return self.env[own[0]] if own else self.last_backward

    def _taken(self, x: Any, step: ReshardStep) -> Any:
        return self._constrained(x, step.after) if step.is_constrained else x

    def _constrained(self, x: Any, spec: Spec) -> Any:
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, partition_spec(spec, self.sharding.axis_names))
        )


def _until_summed(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """The first specs of a value, up to the one without terms that are still to be added."""
    return specs[: 1 + next((n for n, spec in enumerate(specs) if PARTIAL not in spec), len(specs))]
