"""The shardings at a program's border, by pytree path: all that a plan says of a step from outside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.cost_model.errors import InputError
from autoshard.executors.jit import Program
from autoshard.nnx_objects import VariablePath, Variables
from autoshard.search.ir import _jax
from autoshard.search.ir.in_place import InPlace


@dataclass(frozen=True, slots=True)
class Resting:
    """The place of one array: its spec, and whether it lies in the host's memory."""

    spec: PartitionSpec
    is_on_host: bool = False

    @classmethod
    def of(cls, sharding: NamedSharding) -> "Resting":
        """The place that a sharding names."""
        return cls(sharding.spec, sharding.memory_kind == "pinned_host")


@dataclass(frozen=True, slots=True)
class Tree:
    """An argument or a part of the result: its name, and the place of each of its arrays by path."""

    name: str
    leaves: Mapping[str, Resting]

    @property
    def hosted(self) -> tuple[str, ...]:
        """The paths of the arrays on the host."""
        return tuple(path for path, leaf in self.leaves.items() if leaf.is_on_host)


@dataclass(frozen=True, slots=True)
class Objects:
    """The NNX objects among a step's arguments, which the step changes in place.

    Attributes:
      names: of the arguments that are objects.
      num_results: number of arrays in the step's own result; those of changed variables follow on them.
      changed: for each changed variable, the number of its flat argument.
    """

    names: tuple[str, ...]
    num_results: int
    changed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """The shardings at a program's border.

    Attributes:
      step: the step's name.
      mesh: the size of each mesh axis by name, outermost first.
      arguments: one tree per argument.
      results: per part of the result, the number of the argument whose shardings it has, or a tree of its own.
      is_tuple: whether the result is a tuple, of which `results` has the elements.
      donated: the numbers of the arguments of which each array is donated.
      partly_donated: the names of the arguments of which some arrays are donated.
      call: the equation of the jitted program, in terms of the flat arguments.
      objects: the NNX objects among the arguments; None without them. Then `results` has their arguments first, and the
        step's own result last.
    """

    step: str
    mesh: Mapping[str, int]
    arguments: tuple[Tree, ...]
    results: tuple[int | Tree, ...]
    is_tuple: bool
    donated: tuple[int, ...]
    partly_donated: tuple[str, ...]
    call: _jax.JittedCall
    objects: Objects | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments' names."""
        return tuple(tree.name for tree in self.arguments)

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The arguments, then the parts of the result that have shardings of their own."""
        return (*self.arguments, *(tree for tree in self.results if isinstance(tree, Tree)))

    @classmethod
    def of(cls, program: Program, names: Sequence[str]) -> "ProgramLayout":
        """The border of a program.

        Args:
          program: the program of a whole step.
          names: of its arguments.
        """
        call = _jax.jitted_call(program.fn, program.args)
        structure = jax.tree.structure(jax.eval_shape(program.fn, *program.args))
        made = jax.tree.unflatten(structure, call.out_shardings)
        if isinstance(made, InPlace):
            return cls._of_objects(program, names, call, made)
        parts = list(made) if type(made) is tuple else [made]
        labels = [f"result {i}" for i in range(len(parts))] if type(made) is tuple else ["result"]
        whole = tuple(i for i in range(len(names)) if _is_all_donated(program, i))
        some = [name for i, name in enumerate(names) if program.donated[i] and i not in whole]
        return cls(
            program.name,
            dict(program.mesh.shape),
            arguments(program, names),
            tuple(_result(*pair, program) for pair in zip(labels, parts, strict=True)),
            type(made) is tuple,
            whole,
            tuple(some),
            call,
        )

    @classmethod
    def _of_objects(
        cls, program: Program, names: Sequence[str], call: _jax.JittedCall, made: InPlace
    ) -> "ProgramLayout":
        """The border of a program whose arguments hold objects. These come back whole, so they are donated whole."""
        of_objects = [i for i, x in enumerate(program.args) if isinstance(x, Variables)]
        objects = Objects(
            tuple(names[i] for i in of_objects), len(jax.tree.leaves(made.result)), tuple(sorted(made.left))
        )
        return cls(
            program.name,
            dict(program.mesh.shape),
            arguments(program, names),
            (*of_objects, _tree("result", made.result)),
            True,
            tuple(of_objects),
            (),
            call,
            objects,
        )


def arguments(program: Program, names: Sequence[str]) -> tuple[Tree, ...]:
    """The places of a program's arguments.

    Raises:
      InputError: two arrays of an argument have one path and lie apart.
    """
    return tuple(_tree(name, x) for name, x in zip(names, program.shardings, strict=True))


def _tree(name: str, shardings: Any) -> Tree:
    return Tree(name, by_path(name, shardings, Resting.of))


def by_path[Place](name: str, tree: Any, place: Callable[[Any], Place]) -> dict[str, Place]:
    """The places of an argument's arrays by their paths.

    Args:
      name: the argument's.
      tree: a pytree with a leaf for each array.
      place: the place that a leaf says.

    Raises:
      InputError: two arrays have one path and lie apart.
    """
    found = dict[str, Place]()
    for path, leaf in jax.tree.leaves_with_path(tree):
        text, there = path_text(path), place(leaf)
        if found.setdefault(text, there) != there:
            raise InputError(
                f"two arrays of {name} have the path {text!r} and lie apart, so that a path does not name one of them. "
                "Rename a key that holds a slash"
            )
    return found


def path_text(path: Any) -> str:
    """A path inside an argument, such as `params/0/kernel`; of an NNX object, as in its `nnx.State`."""
    keys = (
        key.slashed
        if isinstance(key, VariablePath)
        else jax.tree_util.keystr((key,), simple=True, separator="/")
        for key in path
    )
    return "/".join(keys)


def _result(name: str, shardings: Any, program: Program) -> int | Tree:
    """The argument whose structure and shardings a part of the result has, or its own tree."""
    flat = jax.tree.flatten(shardings)
    for i, own in enumerate(program.shardings):
        if flat[0] and jax.tree.flatten(own) == flat:
            return i
    return _tree(name, shardings)


def _is_all_donated(program: Program, argument: int) -> bool:
    first = sum(len(jax.tree.leaves(x)) for x in program.args[:argument])
    span = range(first, first + len(jax.tree.leaves(program.args[argument])))
    return bool(span) and program.donated_leaves.issuperset(span)
