"""State to be created: first its shapes, which the step is planned with, then its arrays, created on their shards."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import equinox_modules, nnx_objects
from autoshard.calls import Call, Callee
from autoshard.cost_model.errors import InputError, first_line
from autoshard.executors.rewrite import evaluator
from autoshard.placing import put
from autoshard.search.ir import _jax, own_meshes
from autoshard.search.ir.in_place import InPlace
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import TRACE_ERRORS, step_name, whole_graph


class Number(int):
    """The index of an array among all created ones; it stands for the array in a pytree."""

    dtype = np.dtype(int)


@dataclass(frozen=True, eq=False)
class Creation:
    """A traced call that creates state.

    Attributes:
      name: the name of the function that creates the state.
      call: its call in pure form.
      jaxpr: the call's jaxpr.
      returned: the shapes of its results.
    """

    name: str
    call: Call
    jaxpr: Any
    returned: Any

    @classmethod
    def of(cls, create: Callable[..., Any], args: tuple[Any, ...]) -> "Creation":
        """Traces a call of `create`.

        Raises:
          InputError: the call cannot be traced, or returns no array.
        """
        if not callable(create):
            raise InputError(
                "wanted a function that creates the state, such as create in init(create, key, args=(batch,)), "
                f"got {type(create).__name__}"
            )
        call = Callee.of(create).call(args, {})
        try:
            with _jax.implicit_mesh():
                jaxpr, returned = jax.make_jaxpr(equinox_modules.pure(call.step), return_shape=True)(
                    *jax.tree.map(_unplaced, call.args)
                )
        except TRACE_ERRORS as e:
            raise InputError(
                f"{step_name(create)}, which shall create the state, cannot be traced by jax.jit: {first_line(e)}"
            ) from e
        own_meshes.placements(
            jaxpr
        )  # refuses code per device; shardings are ignored, since the plan has its own
        if not jax.tree.leaves(returned):
            raise InputError(
                f"{step_name(create)}, which shall create the state, returns no array; perhaps its `return` is missing"
            )
        return cls(step_name(create), call, jaxpr, returned)

    def shapes(self) -> Any:
        """The state with shapes in place of arrays."""
        return self._holding(jax.tree.leaves(self.returned))

    def numbers(self) -> Any:
        """The state with each array replaced by its `Number`."""
        return self._holding(map(Number, range(self._tree.num_leaves)))

    def abstract(self, mesh: Any, shardings: Mapping[int, Any]) -> Any:
        """The state as shapes with shardings, given by number; arrays without one are no argument of the step, and are
        replicated on `mesh`."""
        places = self._places(mesh, shardings)
        shapes = jax.tree.leaves(self.returned)
        return self._holding(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s, weak_type=_jax.is_weak(x))
            for x, s in zip(shapes, places, strict=True)
        )

    def on(self, mesh: Any, shardings: Mapping[int, Any]) -> Any:
        """The state, created on shardings given by number; arrays without one are no argument of the step, and are
        replicated on `mesh`."""
        places = self._places(mesh, shardings)
        made: dict[int, Any] = {}
        with _jax.no_mesh():
            for own in dict.fromkeys((mesh, *(place.mesh for place in places))):
                made |= self._made_on(own, {n: place for n, place in enumerate(places) if place.mesh == own})
        flat = [made[n] for n in range(len(places))]
        return self.call.result(jax.tree.unflatten(self._tree, flat), self._given_on(mesh))

    def _made_on(self, mesh: Any, places: Mapping[int, Any]) -> dict[int, Any]:
        """Creates the arrays that lie on one mesh, by number."""

        graph = whole_graph(self.jaxpr)
        nothing = StepSharding(tuple(mesh.shape.values()), mesh.axis_names, {}, {})

        def create(*args: Any) -> Any:
            with _jax.on_mesh(mesh):
                flat = evaluator(graph, nothing, mesh)(args)
            return {n: flat[n] for n in places}

        return jax.jit(create, out_shardings=dict(places))(*self._given_on(mesh)) if places else {}

    def _given_on(self, mesh: Any) -> list[Any]:
        """The call's arguments, replicated on a mesh."""
        arguments = jax.tree.leaves(self.call.args)
        return put(arguments, [NamedSharding(mesh, PartitionSpec())] * len(arguments))

    @property
    def _tree(self) -> Any:
        return jax.tree.structure(self.returned)

    def _places(self, mesh: Any, shardings: Mapping[int, Any]) -> list[Any]:
        whole = NamedSharding(mesh, PartitionSpec())
        return [shardings.get(n, whole) for n in range(self._tree.num_leaves)]

    def _holding(self, leaves: Iterable[Any]) -> Any:
        """The state with these leaves."""
        held = jax.tree.unflatten(self._tree, leaves)
        given = [None] * len(jax.tree.leaves(self.call.args))
        if isinstance(held, InPlace):
            return nnx_objects.put_together(held, given, None)
        return equinox_modules.whole(held)


def _unplaced(x: Any) -> Any:
    """An array's shape and type, without its sharding."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=_jax.is_weak(x))
