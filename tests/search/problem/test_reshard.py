"""Reshard paths against devices that hold arrays: each step is done with NumPy, and must arrive where it says.

`Devices` knows no rules: it lays an array out by a spec, padded as XLA pads it, and does a collective as MPI defines it.
A step is right if what the devices then hold is the array laid out by the spec after it.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import inf, prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Value
from autoshard.search.ir.spec import MAX_PADDING, PARTIAL, WHOLE, Spec
from autoshard.search.problem.reshard import ALONE, SLICE, SLICE_S, Handling, Resharder

TERMS = Handling(at_once=True)
DTYPE = np.dtype("float32")

CASES = [
    ((3,), (48, 48)),
    ((3,), (47, 48)),
    ((5,), (49, 50)),
    ((2, 3), (48, 48)),
    ((2, 3), (47, 48)),  # halves of 24 and 23, padded, which three devices cut evenly
    ((2, 3), (94, 48)),  # halves of 47, which they do not
    ((4, 3), (8, 47)),  # 8 over 3 would be padded by an eighth
    ((3, 4), (47, 47)),
    ((2, 2, 2), (32,)),
    ((2, 3, 2), (95,)),
]
"""Mesh and shape."""

Held = dict[tuple[int, ...], np.ndarray]
"""What each device holds, by its coordinates."""


@dataclass(frozen=True)
class Devices:
    """A mesh of devices that share an array of one shape."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]

    def laid_out(self, spec: Spec) -> Held:
        """The array by a spec; padding is zero, and terms of a sum differ."""
        return {at: self._own(spec, at) for at in np.ndindex(*self.mesh)}

    def _own(self, spec: Spec, at: tuple[int, ...]) -> np.ndarray:
        x = 1.0 + np.arange(prod(self.shape), dtype=float).reshape(self.shape)
        for axis, n in enumerate(self.mesh):
            if spec[axis] == PARTIAL:
                x = x * (1 + at[axis]) / (n * (n + 1) / 2)
        for d in range(len(self.shape)):
            axes = [a for a, dim in enumerate(spec) if dim == d]
            group = list(product(*(range(self.mesh[a]) for a in axes)))
            x = cut(padded(x, d, len(group)), d, len(group))[group.index(tuple(at[a] for a in axes))]
        return x

    def taken(self, kind: str, axes: tuple[int, ...], before: Spec, after: Spec) -> tuple[Held, int]:
        """What each device holds after a step, and the most elements that one has on the way.

        Raises:
          ValueError: something would have to be cut unevenly.
        """
        here, there = before[axes[0]], after[axes[0]]
        held, done, most = self.laid_out(before), {}, 0
        for at, own in held.items():
            members = list(product(*(range(n) if a in axes else (at[a],) for a, n in enumerate(self.mesh))))
            group, mine = [held[m] for m in members], members.index(at)
            if kind == "all-reduce":
                made = np.add.reduce(group)
            elif kind == "reduce-scatter":
                made = cut(np.add.reduce(group), there, len(group))[mine]
            elif kind == "all-to-all":
                made = np.concatenate([cut(x, there, len(group))[mine] for x in group], here)
            elif kind == "all-gather":
                made = np.concatenate(group, here)
            else:
                assert kind == SLICE
                made = cut(own if there in before else padded(own, there, len(group)), there, len(group))[
                    mine
                ]
            most = max(most, own.size, made.size)
            is_whole = kind == "all-gather" and here not in after
            done[at] = np.take(made, range(self.shape[here]), here) if is_whole else made
        return done, most

    def bytes_moved(self, kind: str, axes: tuple[int, ...], before: Spec, after: Spec) -> int | None:
        """By a step on one device; None where it doesn't lead from one spec to the other."""
        try:
            done, most = self.taken(kind, axes, before, after)
        except ValueError:
            return None
        wanted = self.laid_out(after)
        agrees = all(done[at].shape == x.shape and np.allclose(done[at], x) for at, x in wanted.items())
        return most * DTYPE.itemsize if agrees else None


def padded(x: np.ndarray, d: int, parts: int) -> np.ndarray:
    return np.pad(x, [(0, -n % parts if e == d else 0) for e, n in enumerate(x.shape)])


def cut(x: np.ndarray, d: int, parts: int) -> list[np.ndarray]:
    if x.shape[d] % parts:
        raise ValueError(f"{x.shape[d]} cannot be cut into {parts}")
    return np.split(x, parts, d)


def resharder(mesh: tuple[int, ...]) -> Resharder:
    return Resharder(MeshModel(parse_cluster(f"{prod(mesh)}xH100-80GB"), mesh))


def taken(
    mesh: MeshModel, kind: str, axes: tuple[int, ...], num_bytes: float, combined: float = 0.0
) -> float:
    return SLICE_S if kind == SLICE else float(mesh.time_s(kind, axes, num_bytes, combined))


def parts(spec: Spec, mesh: tuple[int, ...], rank: int) -> list[int]:
    return [prod(n for e, n in zip(spec, mesh, strict=True) if e == d) for d in range(rank)]


@pytest.mark.parametrize(("mesh", "shape"), CASES)
def test_paths_lead_where_they_should_and_cost_what_their_steps_move(mesh, shape):
    reshard, value, devices = resharder(mesh), Value(shape, DTYPE), Devices(mesh, shape)
    specs, steps = reshard.specs(len(shape)), set()
    for how in (ALONE, TERMS):
        seconds = reshard.seconds(value, how)
        for source, target in np.argwhere(np.isfinite(seconds)).tolist():
            here, path = specs[source], reshard.chain(value, specs[source], specs[target], how)
            for step in path:
                steps.add((here, step))
                here = step.after
            assert here == specs[target]
            taken_s = sum(taken(reshard.mesh, step.kind, step.axes, step.num_bytes) for step in path)
            assert taken_s == pytest.approx(seconds[source, target], rel=1e-9, abs=0)
    assert steps
    for here, step in steps:
        moved = devices.bytes_moved(step.kind, step.axes, here, step.after)
        assert moved == step.num_bytes, f"{step} from {here}"


@cache
def steps_by_force(mesh: tuple[int, ...], shape: tuple[int, ...]) -> dict[Spec, list[tuple]]:
    """By spec: (kind, axes, seconds, spec after) of every step that arrives and that XLA makes."""
    model, devices = resharder(mesh).mesh, Devices(mesh, shape)
    specs, is_even = [], {}
    for spec in product((PARTIAL, WHOLE, *range(len(shape))), repeat=len(mesh)):
        per_dim = list(zip(shape, parts(spec, mesh, len(shape)), strict=True))
        is_even[spec] = all(n % p == 0 for n, p in per_dim)
        if all(-n % p <= MAX_PADDING * n for n, p in per_dim):
            specs.append(spec)
    found = {spec: [] for spec in specs}
    for before, after in product(specs, repeat=2):
        axes = tuple(a for a in range(len(mesh)) if before[a] != after[a])
        moves = {(before[a], after[a]) for a in axes}
        if len(moves) != 1 or PARTIAL in {there for _, there in moves}:
            continue
        kind = kind_of(*moves.pop())
        if PARTIAL in after and kind != "reduce-scatter":
            continue  # what is partial does not move before it is reduced, over all axes at once
        if kind == "all-to-all" and not (is_even[before] and is_even[after]):
            continue
        moved = devices.bytes_moved(kind, axes, before, after)
        if moved is not None:
            found[before].append((kind, axes, taken(model, kind, axes, moved), after))
    return found


def kind_of(here: int, there: int) -> str:
    if here == PARTIAL:
        return "all-reduce" if there == WHOLE else "reduce-scatter"
    return ("all-gather" if there == WHOLE else "all-to-all") if here != WHOLE else SLICE


def cheapest_by_force(mesh, shape, at_once: bool) -> dict[tuple[Spec, Spec], float]:
    """Seconds between all pairs of specs: rounds of relaxation among those that are not partial; then, from the least
    partial to the most, the best step that does not reduce whole what the target splits, or if there is none, the best."""
    steps = steps_by_force(mesh, shape)
    whole = [s for s in steps if PARTIAL not in s]
    best = {(s, t): 0.0 if s == t else inf for s in steps for t in steps}
    for _ in whole:
        for s in whole:
            for *_, seconds, after in steps[s]:
                for t in whole:
                    best[s, t] = min(best[s, t], seconds + best[after, t])
    for s in sorted(set(steps) - set(whole), key=lambda s: s.count(PARTIAL)):
        for t in whole:
            ways = [
                (any(kind == "all-reduce" and t[a] >= 0 for a in axes), seconds + best[after, t])
                for kind, axes, seconds, after in steps[s]
                if not (at_once and PARTIAL in after)
            ]
            ways = [(wastes and not at_once, cost) for wastes, cost in ways if cost < inf]
            best[s, t] = min(ways, default=(False, inf))[1]
    return best


@pytest.mark.parametrize(("mesh", "shape"), CASES)
@pytest.mark.parametrize("how", [ALONE, TERMS], ids=["alone", "at once"])
def test_seconds_are_those_of_the_cheapest_steps(mesh, shape, how):
    reshard, value = resharder(mesh), Value(shape, DTYPE)
    specs, seconds = reshard.specs(len(shape)), reshard.seconds(value, how)
    best = cheapest_by_force(mesh, shape, how.at_once)
    for (i, source), (j, target) in product(enumerate(specs), repeat=2):
        if PARTIAL not in target:
            assert seconds[i, j] == pytest.approx(best.get((source, target), inf), rel=1e-9, abs=0), (
                f"{source} to {target}"
            )


@pytest.mark.parametrize(("mesh", "shape"), CASES)
def test_no_step_is_free_and_no_detour_is_shorter(mesh, shape):
    seconds = resharder(mesh).seconds(Value(shape, DTYPE), TERMS)
    fits = np.isfinite(np.diagonal(seconds))
    seconds = seconds[np.ix_(fits, fits)]
    assert (np.diagonal(seconds) == 0).all()
    assert seconds[~np.eye(len(seconds), dtype=bool)].min() >= SLICE_S
    through = seconds[:, :, None] + seconds[None, :, :]
    assert (seconds <= through.min(axis=1) * (1 + 1e-12)).all()


COMPILED = [
    ((WHOLE, 0), (WHOLE, WHOLE), [("all-gather", (1,), 4020024)]),
    ((0, 0), (WHOLE, WHOLE), [("all-gather", (0, 1), 4044096)]),
    ((0, 1), (0, WHOLE), [("all-gather", (1,), 1009020)]),
    ((0, 0), (0, WHOLE), [("all-gather", (0, 1), 4044096)]),  # by a part it would take a permute
    ((WHOLE, 0), (WHOLE, 1), [("all-gather", (1,), 4020024)]),
    ((PARTIAL, 1), (WHOLE, 1), [("all-reduce", (0,), 1341340)]),
    ((WHOLE, PARTIAL), (WHOLE, 0), [("all-reduce", (1,), 4016012)]),
    ((PARTIAL, PARTIAL), (1, WHOLE), [("all-reduce", (0, 1), 4016012)]),
]
"""From, to, and what XLA:GPU communicates with JAX 0.12, for f32[1001, 1003] on 4x3 devices."""


@pytest.mark.parametrize(("source", "target", "compiled"), COMPILED)
def test_uneven_paths_are_those_that_are_compiled(source, target, compiled):
    path = resharder((4, 3)).chain(Value((1001, 1003), DTYPE), source, target)
    assert [(s.kind, s.axes, s.num_bytes) for s in path if s.kind != SLICE] == compiled


def test_a_sum_is_scattered_over_one_axis_before_it_is_reduced_over_another():
    value, source, target = Value((96, 96), DTYPE), (PARTIAL, PARTIAL), (WHOLE, 0)
    kinds = [
        [(s.kind, s.axes) for s in resharder((4, 3)).chain(value, source, target, how)]
        for how in (ALONE, TERMS)
    ]
    assert kinds == [
        [("reduce-scatter", (1,)), ("all-reduce", (0,))],
        [("all-reduce", (0, 1)), (SLICE, (1,))],
    ]


def test_only_even_splits_are_exchanged():
    for columns, kinds in ((4800, ["all-to-all"]), (4799, ["all-gather", SLICE])):
        path = resharder((3,)).chain(Value((4800, columns), DTYPE), (0,), (1,))
        assert [s.kind for s in path] == kinds


def test_what_is_joined_costs_its_share():
    reshard, value = resharder((3,)), Value((48, 48), DTYPE)
    gather = reshard.index((0,), 2), reshard.index((WHOLE,), 2)
    tenfold_s = reshard.mesh.time_s("all-gather", (0,), 10 * value.num_bytes)
    joined = Handling(combined_bytes=10 * value.num_bytes)
    assert reshard.seconds(value, joined)[gather] == pytest.approx(tenfold_s / 10)
    assert reshard.seconds(value, joined)[gather] < reshard.seconds(value)[gather]


def test_a_sum_of_converted_terms_is_reduced_in_their_type_and_never_scattered():
    reshard, value, converted = resharder((3,)), Value((48, 48), DTYPE), Handling(True, term_itemsize=2)
    for source, target, steps in (
        (PARTIAL, WHOLE, [("all-reduce", 0.5)]),
        (PARTIAL, 0, [("all-reduce", 0.5), (SLICE, 1.0)]),
        (0, WHOLE, [("all-gather", 1.0)]),
    ):
        chain = reshard.chain(value, (source,), (target,), converted)
        assert [(s.kind, s.num_bytes / value.num_bytes) for s in chain] == steps


def test_what_is_converted_moves_in_the_narrower_type_in_one_step_that_sums_nothing():
    reshard, value, converted = (
        resharder((2, 4)),
        Value((4800, 4800), DTYPE),
        Handling(narrow_dtype=np.dtype("float16")),
    )
    for source, target, steps in (
        ((0, WHOLE), (1, WHOLE), [("all-to-all", 0.25, True)]),
        ((0, WHOLE), (WHOLE, WHOLE), [("all-gather", 0.5, True)]),
        ((0, 0), (WHOLE, WHOLE), [("all-gather", 0.5, True)]),
        ((0, 1), (1, 1), [("all-to-all", 0.125, False), ("all-to-all", 0.125, False)]),
        ((PARTIAL, WHOLE), (WHOLE, WHOLE), [("all-reduce", 1.0, False)]),
        ((PARTIAL, WHOLE), (0, WHOLE), [("reduce-scatter", 1.0, False)]),
        ((WHOLE, WHOLE), (0, WHOLE), [(SLICE, 1.0, False)]),
    ):
        chain = reshard.chain(value, source, target, converted)
        assert [(s.kind, s.num_bytes / value.num_bytes, s.is_narrowed) for s in chain] == steps
    gather, half = (reshard.index((0, 0), 2), reshard.index((WHOLE, WHOLE), 2)), Value((4800, 2400), DTYPE)
    assert reshard.seconds(value, converted)[gather] == pytest.approx(reshard.seconds(half)[gather])
    assert (reshard.seconds(value, converted) <= reshard.seconds(value)).all()


def test_chains_of_an_empty_array_come_to_an_end():
    reshard, value = resharder((2, 4)), Value((0, 8), DTYPE)
    joined = Handling(combined_bytes=2**20)
    specs = reshard.specs(2)
    for source, target in np.argwhere(np.isfinite(reshard.seconds(value, joined))):
        chain = reshard.chain(value, specs[source], specs[target], joined)
        assert source == target or chain[-1].after == specs[target]
        assert len({step.after for step in chain}) == len(chain)


def test_values_that_are_met_together_cost_what_each_costs_alone():
    mesh = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))
    shapes = (48, 48), (47, 64), (8, 1024), (3, 5), (64,)
    wanted = [
        (Value(shape, DTYPE), how) for shape in shapes for how in (ALONE, TERMS, Handling(False, 3e7, 2))
    ]
    together = Resharder(mesh)
    together.learn(wanted)
    for value, how in wanted:
        np.testing.assert_array_equal(together.seconds(value, how), Resharder(mesh).seconds(value, how))
    assert len({together.seconds(*one).tobytes() for one in wanted}) > len(shapes)


SIZES = st.sampled_from([1, 2, 3, 5, 8, 12, 47, 48, 96, 1000, 16384])
HANDLINGS = st.builds(
    Handling,
    at_once=st.booleans(),
    combined_bytes=st.sampled_from([0.0, 3e7]),
    term_itemsize=st.sampled_from([0, 1, 2]),
    narrow_dtype=st.sampled_from([None, np.dtype("int8"), np.dtype("float16")]),
)


@given(
    st.sampled_from([(2,), (8,), (4, 2), (3, 4), (16, 16), (2, 2, 2), (3, 2, 4), (16, 2, 16)]),
    st.lists(SIZES, max_size=3).map(tuple),
    st.sampled_from(["int8", "bfloat16", "float32", "float64"]),
    HANDLINGS,
)
@example((16, 2, 16), (16384, 1000), "float32", Handling(narrow_dtype=np.dtype("int8")))
def test_every_chain_ends_and_its_seconds_are_the_tables(mesh, shape, dtype, how):
    reshard, value = resharder(mesh), Value(shape, np.dtype(dtype))
    specs, seconds = reshard.specs(len(shape)), reshard.seconds(value, how)
    finite = np.argwhere(np.isfinite(seconds))
    for source, target in finite[:: 1 + len(finite) // 400].tolist():
        chain = reshard.chain(value, specs[source], specs[target], how)
        met = [specs[source], *(step.after for step in chain)]
        assert met[-1] == specs[target]
        assert len(set(met)) == len(met)
        took_s = (
            max(SLICE_S, taken(reshard.mesh, s.kind, s.axes, s.num_bytes, how.combined_bytes)) for s in chain
        )
        assert sum(took_s) == pytest.approx(seconds[source, target], rel=1e-9, abs=0)
