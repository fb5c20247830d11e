"""The files with a whole step: the wrapper of the user's step, and the written program.

Both define `sharded(step, *args)`, which gives a jitted function, and `placed`, which puts a state on its devices. The
user's training loop stays as it is: the file imports neither autoshard nor the user's module.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.ejection import source
from autoshard.ejection.layout import Objects, ProgramLayout, Tree
from autoshard.ejection.shardings_file import constants, docstring
from autoshard.ejection.written import INDENT, PrintedProgram, identifier, written

IMPORTS = """import jax
{}from jax.sharding import AxisType, NamedSharding, PartitionSpec as P"""

FUNCTIONS = '''def make_mesh(devices=None):
    """The devices along the axes of `MESH`."""
    axis_types = (AxisType.Auto,) * len(MESH)
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=axis_types, devices=devices)


def shardings(name, tree, mesh):
    """The sharding of each array of an argument or a result, from `SPECS` by its path."""

    def sharding(path, _):
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = MEMORY_KINDS.get(name, {}).get(key)
        return NamedSharding(mesh, SPECS[name][key], memory_kind=kind)

    return jax.tree.map_with_path(sharding, tree)


def placed(name, tree, mesh):
    """An argument, put on the devices: `placed("state", state, mesh)`."""
    return jax.device_put(tree, shardings(name, tree, mesh))
'''

SHARDED = '''def sharded(step, *args, mesh=None):
    """The step, jitted for the devices of a mesh.

    Args:
      step: `{step}`, as it is written for one device{use}.
      args: its arguments, or their shapes.
      mesh: by default, of the first devices that JAX sees.
    """
    mesh = make_mesh() if mesh is None else mesh
{apart}    inputs = tuple(shardings(name, x, mesh) for name, x in zip(ARGUMENTS, args, strict=True))
    result = jax.eval_shape(step, *args)
{run}
    {given} jax.jit(
        run,
        in_shardings=inputs,
        out_shardings={outputs},
        donate_argnums={donated},
        compiler_options=GPU_OPTIONS if jax.default_backend() == "gpu" else None,
    )
{in_place}'''

PURE = '''def objects(args):
    """The NNX objects among the arguments."""
    return tuple(x for name, x in zip(ARGUMENTS, args, strict=True) if name in OBJECTS)


def apart(args):
    """The graph of the objects, and the arguments with an `nnx.State` in place of each object.

    A variable that two objects share stands with the first one.
    """
    graph, state = nnx.split(objects(args))
    states = {name: state.get(i, nnx.State({})) for i, name in enumerate(OBJECTS)}
    return graph, tuple(states.get(name, x) for name, x in zip(ARGUMENTS, args, strict=True))


def joined(states):
    """The states of the objects as one."""
    return nnx.State({i: state for i, state in enumerate(states) if state})


def pure(step, graph):
    """The step as a function of states, which returns the new states and the step's result."""

    def run(*args):
        merged = nnx.merge(graph, joined(objects(args)))
        whole = dict(zip(ARGUMENTS, args, strict=True)) | dict(zip(OBJECTS, merged, strict=True))
        result = step(*whole.values())
        return (*objects(apart(whole.values())[1]), result)

    return run
'''

APART = """    graph, args = apart(args)
    step = pure(step, graph)
"""

IN_PLACE = """
    def in_place(*args):
        *states, result = jitted(*apart(args)[1])
        nnx.update(objects(args), joined(states))
        return result

    in_place.jitted = jitted
    return in_place
"""


def usage(layout: ProgramLayout) -> str:
    """The lines of a training loop that use the file."""
    if layout.objects is not None:
        return _usage_of_objects(layout, layout.objects)
    names = list(layout.names)
    results = [names[part] if isinstance(part, int) else "metrics" for part in layout.results]
    placed = [f"{names[i]} = placed({source.quoted(names[i])}, {names[i]}, mesh)" for i in layout.donated]
    called = f"({', '.join(names)})"
    lines = [
        "mesh = make_mesh()",
        *placed,
        f"train_step = sharded({', '.join((layout.step, *names))}, mesh=mesh)",
        f"{', '.join(dict.fromkeys(results))} = train_step{called}",
    ]
    return "\n".join(f"{INDENT}{line}" for line in lines)


def _usage_of_objects(layout: ProgramLayout, objects: Objects) -> str:
    called = ", ".join(layout.names)
    placed = (
        f"nnx.update({name}, placed({source.quoted(name)}, nnx.state({name}), mesh))"
        for name in objects.names
    )
    lines = ["mesh = make_mesh()", *placed, f"train_step = sharded({layout.step}, {called}, mesh=mesh)"]
    return "\n".join(f"{INDENT}{line}" for line in [*lines, f"result = train_step({called})"])


def wrapper_file(
    layout: ProgramLayout,
    read: Mapping[str, Mapping[str, PartitionSpec]],
    options: Mapping[str, str],
    paragraphs: Sequence[str],
) -> str:
    """The file that jits the user's own step.

    Args:
      layout: the shardings at the step's border.
      read: per argument, the specs in which its arrays are read, by path; of those that are not read as they rest.
      options: the compiler's options on GPUs.
      paragraphs: the paragraphs of the file's docstring.
    """
    is_hosted = any(tree.hosted for tree in layout.arguments)
    run = [
        "def run(*args):",
        *[f"{INDENT}args = on_device(args)"] * is_hosted,
        *[f"{INDENT}args = as_read(args, mesh)"] * bool(read),
        f"{INDENT}return step(*args)",
    ]
    helpers = [HOSTED] * is_hosted + [READ] * bool(read)
    return _file(layout, options, paragraphs, _Content(run, constants=_read_constants(read), helpers=helpers))


def printed(layout: ProgramLayout) -> PrintedProgram:
    """The layout's program, with arguments named by their paths."""
    resting = [leaf.spec for tree in layout.arguments for leaf in tree.leaves.values()]
    return written(layout.call, _flat_names(layout), resting)


def _flat_names(layout: ProgramLayout) -> list[str]:
    """A name for each flat argument; a number follows on one that came before."""
    found: dict[str, None] = {}
    for tree in layout.arguments:
        for path in tree.leaves:
            name = identifier(f"{tree.name}/{path}")
            numbered = (f"{name}_{n}" for n in itertools.count(2))
            found[name if name not in found else next(n for n in numbered if n not in found)] = None
    return list(found)


LOADED = """with np.load(__file__.removesuffix(".py") + ".npz") as arrays:
    CONSTANTS = dict(arrays)"""


def written_file(
    layout: ProgramLayout, body: PrintedProgram, options: Mapping[str, str], paragraphs: Sequence[str]
) -> str:
    """The file that has the program itself, as `printed` gives it."""
    program = [
        "def written(",
        *(f"{INDENT}{name}," for name in ("mesh", *_flat_names(layout))),
        "):",
        f'{INDENT}"""`{layout.step}` of flat arguments, with its gradients, on the mesh."""',
        "",
        f"{INDENT}def constrained(x, spec):",
        f"{INDENT * 2}return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))",
        "",
        *(part for line in body.lines for part in _indented(line)),
        "",
    ]
    run = _written_run(layout)
    use = "; here it only gives the structure of the result"
    imports = f"import jax.numpy as jnp\n{'import numpy as np\n' * bool(body.stored)}from jax import lax\n"
    loaded = [LOADED] if body.stored else []
    return _file(layout, options, paragraphs, _Content(run, use, loaded, ["\n".join(program)], imports))


def _written_run(layout: ProgramLayout) -> list[str]:
    """The function that calls the written program and gives its results their structure."""
    objects = layout.objects
    if objects is None:
        return [
            "def run(*args):",
            f"{INDENT}return jax.tree.unflatten(jax.tree.structure(result), written(mesh, *jax.tree.leaves(args)))",
        ]
    return [
        "def run(*args):",
        f"{INDENT}leaves = jax.tree.leaves(args)",
        f"{INDENT}made = written(mesh, *leaves)",
        f"{INDENT}for number, x in zip(CHANGED, made[{objects.num_results}:], strict=True):",
        f"{INDENT * 2}leaves[number] = x",
        f"{INDENT}states = objects(jax.tree.unflatten(jax.tree.structure(args), leaves))",
        f"{INDENT}own = jax.tree.unflatten(jax.tree.structure(result[-1]), made[:{objects.num_results}])",
        f"{INDENT}return (*states, own)",
    ]


@dataclass(frozen=True, slots=True)
class _Content:
    """The parts in which the two forms differ.

    Attributes:
      run: the lines of the function that is jitted.
      use: a clause on the argument `step`.
      constants: further assignments.
      helpers: further functions.
      imports: further imports.
    """

    run: Sequence[str]
    use: str = ""
    constants: Sequence[str] = ()
    helpers: Sequence[str] = ()
    imports: str = ""


HOSTED = '''def on_device(args):
    """The arguments in the device's memory."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), args)
'''

READ = '''def as_read(args, mesh):
    """The arguments, as `READ` has them where the step reads them first."""

    def constrained(name, tree):
        def one(path, x):
            key = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = READ.get(name, {}).get(key)
            return x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return jax.tree.map_with_path(one, tree)

    return tuple(constrained(name, x) for name, x in zip(ARGUMENTS, args, strict=True))
'''


def _indented(line: str) -> list[str]:
    bare = line.lstrip()
    return source.broken(bare, INDENT + line[: len(line) - len(bare)])


def _read_constants(read: Mapping[str, Mapping[str, PartitionSpec]]) -> list[str]:
    texts = {name: {path: source.text(spec) for path, spec in specs.items()} for name, specs in read.items()}
    return [source.dictionary("READ", texts)] if read else []


def _file(
    layout: ProgramLayout, options: Mapping[str, str], paragraphs: Sequence[str], content: _Content
) -> str:
    names, objects = ", ".join(map(source.quoted, layout.names)), layout.objects
    assigned = [
        constants(layout.mesh, layout.trees),
        f"ARGUMENTS = ({names}{',' * (len(layout.names) == 1)})",
        *(
            []
            if objects is None
            else _object_constants(objects, is_written="written(" in "".join(content.run))
        ),
        *content.constants,
        source.dictionary("GPU_OPTIONS", {key: source.quoted(value) for key, value in options.items()}),
    ]
    definition = "\n".join(f"{INDENT}{line}" for line in content.run)
    name = source.quoted(identifier(layout.step))
    text = SHARDED.format(
        step=layout.step,
        use=content.use,
        run=f"\n{definition}\n\n{INDENT}run.__name__ = {name}",
        outputs=_outputs(layout),
        donated=source.text(layout.donated),
        apart=APART if objects else "",
        given="jitted =" if objects else "return",
        in_place=IN_PLACE if objects else "",
    )
    imports = f"{content.imports}from flax import nnx\n" if objects else content.imports
    head = [docstring(paragraphs), IMPORTS.format(imports), "\n".join(assigned)]
    helpers = [PURE, *content.helpers] if objects else content.helpers
    return "\n\n".join(head) + "\n\n\n" + "\n\n".join([FUNCTIONS, *helpers, text])


def _object_constants(objects: Objects, is_written: bool) -> list[str]:
    named = f"OBJECTS = {source.text(objects.names)}"
    return [named, f"CHANGED = {source.text(objects.changed)}"] if is_written else [named]


def _outputs(layout: ProgramLayout) -> str:
    """The source of `out_shardings`."""
    if not layout.is_tuple:
        return _output(layout.results[0], "result")
    return source.sequence(tuple(_output(part, f"result[{i}]") for i, part in enumerate(layout.results)))


def _output(part: int | Tree, made: str) -> str:
    return (
        f"inputs[{part}]" if isinstance(part, int) else f"shardings({source.quoted(part.name)}, {made}, mesh)"
    )
