"""What is said where nothing fits: of a step whose peaks are reckoned by hand, and every way out is taken.

A device of four holds a fourth of two arguments of 8 MiB, of their product of 64 MiB and of the result, and a margin for
what the step makes (`search.device.prediction.MARGIN`).
"""

import re
from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_bytes, parse_bytes, parse_seconds
from autoshard.search import driver
from autoshard.search.device import prediction
from autoshard.search.device.prediction import MARGIN
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.options import Options, candidate_shapes
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import PROCESSOR, Deadline
from autoshard.search.space import infeasible
from autoshard.search.step_problem import StepProblem
from tests.zoo import make_dlrm

MIB = 2**20
PEAK = (4 + 16 + 16 + MARGIN * 32) * MIB
CLUSTER = parse_cluster("4xH100-80GB")


def step(w, x):
    return jnp.tanh(x @ w) + 1.0


STEP = trace(
    step, jax.ShapeDtypeStruct((512, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 512), jnp.float32)
)


def options(cap_mib: float, **more) -> Options:
    return Options(int(cap_mib * MIB), **{"offload": "never", **more})


def problems(asked: Options) -> tuple[StepProblem, list[MeshProblem]]:
    """The step, and its problem on each mesh."""
    marks = [str((asked.pins or {}).get(a.name, "")) for a in STEP.arguments]
    step_problem = StepProblem.of(STEP, marks, CLUSTER.device)
    return step_problem, [step_problem.on(CLUSTER, shape) for shape in candidate_shapes(CLUSTER, asked)]


def smallest(asked: Options, tried=None, time_s: float = 20.0) -> infeasible.Smallest | None:
    return infeasible.smallest_peak(tried or problems(asked)[1], asked, Deadline.after(time_s, PROCESSOR))


def explained(asked: Options, time_s: float = 10.0, is_proven: bool = True) -> str:
    step_problem, tried = problems(asked)
    found = smallest(asked, tried)
    return str(
        infeasible.explain(step_problem, CLUSTER, asked, found, is_proven, Deadline.after(time_s, PROCESSOR))
    )


def ways_out(message: str) -> dict[str, str]:
    """What would fit, and its step time."""
    (listed,) = re.findall(r"Any one of these would fit: (.*?)\.(?: Not|$)", message)
    return dict(re.fullmatch(r"(.*) \(step (.*) or less\)", way).groups() for way in listed.split("; "))


# --- the smallest peak


def test_the_smallest_peak_is_the_one_reckoned_by_hand_and_a_search_reaches_it():
    found = smallest(options(1))
    assert found.peak.num_bytes == pytest.approx(PEAK)
    assert found.least_bytes == pytest.approx(PEAK)
    assert found.untried == ()
    assert found.on_mesh.problem.cost_s(found.labels) < inf
    plan = driver.find(STEP, CLUSTER, options(PEAK / MIB + 0.01)).plan
    assert plan.estimates.peak_bytes <= PEAK + 1
    with pytest.raises(InfeasibleError):
        driver.find(STEP, CLUSTER, options(35.9, mesh=(4,)))


class Asked:
    """Which meshes are asked for their smallest peak, and for how long."""

    def __init__(self, monkeypatch) -> None:
        self.shapes, self.times_s = [], []
        original = MeshProblem.smallest_peak

        def asked(on_mesh, kept, time_limit_s):
            self.shapes.append(on_mesh.shape)
            self.times_s.append(time_limit_s)
            return original(on_mesh, kept, time_limit_s)

        monkeypatch.setattr(MeshProblem, "smallest_peak", asked)


def test_strategies_that_a_search_met_count_where_it_finds_no_smaller_peak(monkeypatch):
    """Under a cap that is kept in program order, and not by kernels; so much larger a cap than these need is named."""
    monkeypatch.setattr(prediction, "MARGIN", 2 * MARGIN)  # and not in program order
    needed_bytes = PEAK + MARGIN * 32 * MIB
    smallest_peak = MeshProblem.smallest_peak

    def larger(on_mesh, kept, time_limit_s):
        labels, peak = smallest_peak(on_mesh, kept, time_limit_s)
        return labels, replace(peak, num_bytes=3 * peak.num_bytes)

    monkeypatch.setattr(MeshProblem, "smallest_peak", larger)
    with pytest.raises(InfeasibleError) as raised:
        driver.find(STEP, CLUSTER, options(PEAK / MIB + 0.1))
    message = str(raised.value)
    assert f"The smallest peak found is {format_bytes(needed_bytes)} " in message
    (cap,) = re.findall(r"would fit: a cap of ([^(]+) \(step", message)
    assert parse_bytes(cap) == pytest.approx(infeasible.MET_PEAK_SLACK * needed_bytes, rel=0.01)


PINNED = {"w": P("data")}
"""Which leaves a device half of w on a mesh of 2 x 2."""


def test_the_mesh_that_must_hold_least_is_asked_first_and_no_other_if_it_comes_near(monkeypatch):
    asked = Asked(monkeypatch)
    _, tried = problems(options(1, pins=PINNED))
    assert [on_mesh.shape for on_mesh in tried] == [(4,), (2, 2)]
    found = smallest(options(1, pins=PINNED), tried[::-1])
    assert (asked.shapes, found.on_mesh.shape, found.untried) == ([(4,)], (4,), ())
    assert found.peak.num_bytes == pytest.approx(PEAK)


def test_others_are_asked_while_there_is_time_and_the_best_is_kept(monkeypatch):
    monkeypatch.setattr(infeasible, "CLOSE_TO_FLOOR", 0.0)
    asked = Asked(monkeypatch)
    found = smallest(options(1, pins=PINNED), time_s=10.0)
    assert (asked.shapes, found.on_mesh.shape, found.untried) == ([(4,), (2, 2)], (4,), ())
    assert asked.times_s[0] == pytest.approx(0.5 * 0.4 * 10.0, rel=0.05)
    assert asked.times_s[1] < asked.times_s[0]


def test_of_meshes_that_were_not_asked_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(infeasible, "CLOSE_TO_FLOOR", 0.0)
    asked = Asked(monkeypatch)
    found = smallest(options(1, pins=PINNED), time_s=0.0)
    assert (asked.shapes, found.untried) == ([(4,)], ("2x2",))
    message = str(
        infeasible.explain(
            *problems(options(1, pins=PINNED))[:1],
            CLUSTER,
            options(1),
            found,
            True,
            Deadline.after(0, PROCESSOR),
        )
    )
    assert "Not found out in the time that this took: a smaller peak on mesh 2x2" in message


def test_without_time_one_mesh_is_asked_and_pins_are_not_said_to_contradict(monkeypatch):
    asked = list[tuple[int, ...]]()

    def smallest_peak(on_mesh, kept, time_limit_s):
        asked.append(on_mesh.shape)
        raise NoFitError("nothing", bound_s=inf)

    monkeypatch.setattr(MeshProblem, "smallest_peak", smallest_peak)
    assert smallest(options(1, pins=PINNED), time_s=0.0) is None
    assert len(asked) == 1


@pytest.mark.parametrize("bounds_s", [(inf, inf), (inf, 1.0)])
def test_pins_contradict_one_another_only_where_that_is_proven_on_every_mesh(monkeypatch, bounds_s):
    left = list(bounds_s)

    def smallest_peak(*_):
        raise NoFitError("nothing", bound_s=left.pop())

    monkeypatch.setattr(MeshProblem, "smallest_peak", smallest_peak)
    if bounds_s == (inf, inf):
        with pytest.raises(InfeasibleError, match="the pins contradict one another"):
            smallest(options(1, pins=PINNED))
    else:
        assert smallest(options(1, pins=PINNED)) is None


# --- what is said


def test_first_the_cap_then_the_peak_then_what_would_fit():
    message = explained(options(20))
    assert re.fullmatch(
        r"nothing fits 20 MiB a device on 4xH100-80GB\. "
        r"The smallest peak found is 37 MiB \(mesh 4\), at forward add \(.*test_infeasible\.py:\d+\), where these reside: "
        r"frozen weights 2 MiB, batch 2 MiB, residuals 16\.5 MiB, temporaries 16\.5 MiB\. "
        r"Any one of these would fit: a cap of 37\.3 MiB \(step [^)]*\); 8 devices \(step [^)]*\)\.",
        message,
    )


def test_what_is_not_proven_is_not_said():
    assert explained(options(20), is_proven=False).startswith("nothing was found that fits 20 MiB a device")


def test_without_any_plan_more_time_is_asked_for():
    step_problem, _ = problems(options(20))
    error = infeasible.explain(
        step_problem, CLUSTER, options(20), None, False, Deadline.after(1.0, PROCESSOR)
    )
    assert "there was no time to find out what would" in str(error)
    assert "would fit" not in str(error)


BOTH = {"w": P(), "x": P()}
CASES = {
    "more devices": (options(20), ["8 devices"]),
    "even more": (options(20, pins={"w": P()}), ["16 devices"]),
    "either pin": (options(43, pins=BOTH), ["no pin on w", "no pin on x", "8 devices"]),
    "one pin": (options(40, pins={"w": P(), "x": P("data")}), ["no pin on w", "8 devices"]),
    "another mesh": (options(40, mesh=(1, 4), pins=PINNED), ["no pin on w", "another mesh"]),
    "only a higher cap": (options(1), []),
}


@pytest.mark.parametrize(("asked", "wanted"), CASES.values(), ids=CASES)
def test_every_way_out_has_a_plan_no_slower_than_is_said(asked, wanted):
    message = explained(asked)
    assert "Not found out" not in message
    found = ways_out(message)
    assert [way for way in found if not way.startswith("a cap of")] == wanted
    for way, step_s in found.items():
        relaxed, cluster = relaxation(way, asked)
        taken = driver.find(STEP, cluster, relaxed)
        assert taken.on_mesh.problem.cost_s(taken.chosen) <= 1.01 * parse_seconds(step_s)


def relaxation(way: str, asked: Options):
    cap = asked.memory_bytes
    if found := re.fullmatch("a cap of (.*)", way):
        return Options(parse_bytes(found[1]), asked.mesh, asked.pins), CLUSTER
    if found := re.fullmatch("no pin on (.*)", way):
        return Options(cap, asked.mesh, {n: p for n, p in asked.pins.items() if n != found[1]}), CLUSTER
    if found := re.fullmatch(r"(\d+) devices", way):
        return Options(cap, asked.mesh, asked.pins), parse_cluster(f"{found[1]}xH100-80GB")
    assert way == "another mesh"
    return Options(cap, None, asked.pins), CLUSTER


def test_without_time_every_way_out_is_named_and_none_is_claimed():
    message = explained(options(20, pins=BOTH), time_s=0.0)
    assert list(ways_out(message)) == ["a cap of 49.4 MiB"]
    named = re.search(r"Not found out in the time that this took: (.*)\.", message)
    assert named[1].split(", ") == [
        "no pin on w",
        "no pin on x",
        "16 devices",  # 48 MiB must be held by four
        "32 devices",
        "64 devices",
    ]


@pytest.mark.parametrize("bound_s", [inf, 1e-3])
def test_what_is_neither_found_nor_ruled_out_is_not_claimed(monkeypatch, bound_s):
    def fitting(*_):
        raise NoFitError("nothing", bound_s=bound_s)

    asked = options(20)
    step_problem, tried = problems(asked)
    found = smallest(asked, tried)
    monkeypatch.setattr(MeshProblem, "fitting", fitting)
    message = str(
        infeasible.explain(step_problem, CLUSTER, asked, found, True, Deadline.after(10.0, PROCESSOR))
    )
    assert list(ways_out(message)) == ["a cap of 37.3 MiB"]
    assert ("Not found out in the time that this took: 8 devices" in message) == (bound_s < inf)


def test_the_step_as_it_is_counts_where_what_is_done_to_it_takes_more():
    """Tables of embeddings in microbatches: what each of them adds up takes more than examples do."""
    case = make_dlrm(table_rows=(4_000_000, 1_000_000), embed_dim=128, num_dense=13, batch=1 << 14)
    step = trace(case.step, *case.abstract_args())
    cluster = parse_cluster("8xH100-80GB")
    roomy = driver.find(step, cluster, Options(1 << 40, (8,))).plan.estimates
    with pytest.raises(InfeasibleError) as error:
        driver.find(step, cluster, Options(int(0.35 * roomy.peak_bytes), (8,), offload="never"))
    cap, *_ = ways_out(str(error.value))
    assert parse_bytes(cap.removeprefix("a cap of ")) < 1.2 * roomy.peak_bytes
    assert parse_seconds(ways_out(str(error.value))[cap]) < 1.2 * roomy.step_s


def test_every_kind_of_way_out_has_its_share_of_the_time(monkeypatch):
    """Two pins and more devices; of a share each try has half, and each mesh half of what is left."""
    times_s, costs_s = [], []

    def fitting(on_mesh, kept, limit_bytes, time_limit_s, cutoff_s, relative_gap):
        times_s.append(time_limit_s)
        costs_s.append(cutoff_s)
        return fits(on_mesh, kept, limit_bytes, time_limit_s, cutoff_s, relative_gap)

    asked = options(43, pins=BOTH)
    step_problem, tried = problems(asked)
    found, fits = smallest(asked, tried), MeshProblem.fitting
    monkeypatch.setattr(MeshProblem, "fitting", fitting)
    infeasible.explain(step_problem, CLUSTER, asked, found, True, Deadline.after(36.0, PROCESSOR))
    assert times_s[0] == pytest.approx(36 / 3 / 2 / 2, rel=0.1)
    assert costs_s[0] == inf > costs_s[1]


@pytest.mark.parametrize(
    ("cap_mib", "devices"), [(36, [8, 16, 32, 64]), (18.4, [16, 32, 64]), (4.6, [64]), (2.2, [])]
)
def test_only_as_many_devices_are_tried_as_may_be_enough(cap_mib, devices):
    """37 MiB must be held by four."""
    message = explained(options(cap_mib), time_s=0.0)
    assert [int(n) for n in re.findall(r"(\d+) devices", message)] == devices
