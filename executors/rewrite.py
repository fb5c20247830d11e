"""The step again, with the plan's specs written in.

The graph is evaluated op by op by JAX's tracer, so what comes out is an ordinary function to jit. At the
places that the sharding names, `with_sharding_constraint` imposes a spec; everything else is left as the user
wrote it, so numbers do not depend on the plan but for the order of sums. XLA's partitioner turns the
constraints into the planned collectives.

A copy that the backward phase makes anew (a gathered weight that was not kept) must not be merged by the
compiler with the forward phase's. It is taken from behind an `optimization_barrier` that also holds an
incoming gradient: without that tie the compiler hoists it (measured on XLA:GPU).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from search.ir._jax import abstract_value, bind, provenance
from search.ir.graph import Graph, Op, Phase
from search.ir.sharding import Route, StepSharding, Want
from search.ir.spec import WHOLE, divides, partition_spec

BY_HAND = frozenset({"top_k"})
"""What XLA's partitioner gathers if it is split over some axes of the mesh and not over others. The ops here compute along
one dimension that is whole, so every device applies them to its shard."""


def evaluator(
    graph: Graph, sharding: StepSharding, mesh: Mesh | AbstractMesh
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function of the graph's flat inputs that computes its flat outputs under the sharding's constraints.

    Args:
      graph: what to compute.
      sharding: which specs to impose where.
      mesh: devices, real, simulated or compile-only, with the sharding's axes; or only the axes.
    """

    def evaluate(inputs: Sequence[Any]) -> list[Any]:
        return _Evaluation(graph, sharding, mesh, ()).run(inputs)

    return evaluate


@dataclass(eq=False)
class _Evaluation:
    """One walk over one graph (the step's, or a loop's body)."""

    graph: Graph
    sharding: StepSharding
    mesh: Mesh | AbstractMesh
    path: tuple[Any, ...]
    env: dict[int, Any] = field(default_factory=dict)
    copies: dict[tuple[int, Route, str], Any] = field(default_factory=dict)
    made_backward: set[int] = field(default_factory=set)
    last_backward: Any = None

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        for i, (v, x) in enumerate(zip(self.graph.inputs, inputs, strict=True)):
            self.env[v] = self._placed(x, ("input", self.path, i))
        self.env.update(self.graph.constants)
        for i, op in enumerate(self.graph.ops):
            site = (*self.path, i)
            operands = [self._read(a, ("operand", site, n), op) for n, a in enumerate(op.inputs)]
            with provenance(op.scope, op.source_info):
                results = self._applied(op, operands, site)
            for r, (v, x) in enumerate(zip(op.outputs, results, strict=True)):
                self.env[v] = self._placed(x, ("result", site, r))
                if op.phase is Phase.BACKWARD and getattr(x, "ndim", 0):
                    self.made_backward.add(v)
                    self.last_backward = self.env[v]
        return [self._read(a, ("output", self.path, i), None) for i, a in enumerate(self.graph.outputs)]

    def _applied(self, op: Op, operands: list[Any], site: tuple[Any, ...]) -> list[Any]:
        route = self.sharding.specs.get(("result", site, 0), ())
        by_hand = op.name in BY_HAND and bool(route) and max(route[0]) > WHOLE
        if not by_hand or not divides(route[0], op.result_values[0].shape, self.sharding.mesh_shape):
            return bind(op.primitive, operands, self._params(op, site))
        spec = partition_spec(route[0], self.sharding.axis_names)
        on_shards = jax.shard_map(
            lambda *xs: tuple(bind(op.primitive, list(xs), op.params)),
            mesh=self.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return list(on_shards(*operands))

    def _params(self, op: Op, site: tuple[Any, ...]) -> dict[str, Any]:
        """The op's parameters, with the bodies rewritten."""
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
        abstract = [abstract_value(v.shape, v.dtype, v.weak_type) for v in shapes]
        return jax.make_jaxpr(lambda *xs: _Evaluation(body, self.sharding, self.mesh, path).run(xs))(
            *abstract
        )

    def _placed(self, x: Any, place: Any) -> Any:
        return self._sent(x, self.sharding.specs.get(place, ()))

    def _read(self, atom: Any, place: Any, op: Op | None) -> Any:
        if not isinstance(atom, int):
            return atom.val
        want = self.sharding.wants.get(place)
        return self.env[atom] if want is None else self._arrived(atom, want, op)

    def _arrived(self, v: int, want: Want, op: Op | None) -> Any:
        """The value at the end of its route, shared with all that go the same way."""
        route, phase = (*want.copy, *want.last), want.group if want.is_fresh else ""
        gone = max((n for n in range(len(route) + 1) if (v, route[:n], phase) in self.copies), default=0)
        if gone == 0:
            self.copies[v, (), phase] = self._tied(self.env[v], v, op) if want.is_fresh else self.env[v]
        for n in range(gone, len(route)):
            x = self.copies[v, route[:n], phase]
            self.copies[v, route[: n + 1], phase] = self._sent(x, route[n : n + 1])
        return self.copies[v, route, phase]

    def _tied(self, x: Any, v: int, op: Op | None) -> Any:
        """The value, no sooner than a gradient has arrived."""
        tie = self._incoming(v, op)
        return x if tie is None else jax.lax.optimization_barrier((x, tie))[0]

    def _incoming(self, v: int, op: Op | None) -> Any:
        """A gradient that arrives where the copy is first needed."""
        own = [a for a in (op.operands if op is not None else ()) if a != v and a in self.made_backward]
        return self.env[own[0]] if own else self.last_backward

    def _sent(self, x: Any, route: Route) -> Any:
        for spec in route:
            sharding = NamedSharding(self.mesh, partition_spec(spec, self.sharding.axis_names))
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x
