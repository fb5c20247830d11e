"""The queue of candidates: who has the next turn, when it ends, and what results teach."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import Known
from autoshard.search.options import Options
from autoshard.search.solver.clock import Deadline, WorkClock
from autoshard.search.space.candidates import (
    AGAIN,
    OfForm,
    OfPlan,
    OfRewrite,
    OnMesh,
    SolvedVariant,
)
from autoshard.search.space.certificate import Certificate
from autoshard.search.space.found import Found
from autoshard.search.space.queue import POOR, Queue
from autoshard.search.space.rewrites import Rewrite, UncappedSolution
from autoshard.search.space.trials import Trials
from autoshard.search.space.variants import MISSES_BY, Variant
from tests.search.adamw import adamw_chain

GIB = 1 << 30
STEP = trace(*adamw_chain(num_layers=2, width=64, rows=64))
CLUSTER = parse_cluster("64xH100-80GB")


@dataclass(eq=False)
class Prepared:
    """A prepared step, as far as the queue knows it."""

    has_transfers = False

    step: Step = STEP
    traced: Step = STEP
    hosted: frozenset[int] = frozenset()


def queue(**options):
    clock = WorkClock()
    marks = [""] * len(STEP.arguments)
    return Queue(Trials(STEP, marks, CLUSTER, Options(GIB, **options), lambda line: None, clock))


def plan(seconds, shape=(8, 8), step_problem=None):
    return SimpleNamespace(
        cost_s=seconds,
        communication_s=0.0,
        on_mesh=SimpleNamespace(shape=shape),
        step_problem=step_problem or Prepared(),
    )


@dataclass(eq=False)
class Fake:
    """A candidate that takes a second, and finds a plan or not."""

    search: Queue
    taken: list[str]
    name: str
    estimate_s: float
    least_bytes: float = 0.0
    finds_s: float = math.inf
    parts: list["Fake"] = field(default_factory=list)

    def take(self, limit_s):
        self.taken.append(self.name)
        self.search.trials.clock.spend(1.0)
        if self.finds_s < self.search.trials.cutoff_s:
            self.search.trials.shared.best = plan(self.finds_s)
        return self.parts


def turns(search, *candidates):
    """The candidates that have turns, in order."""
    taken = list[str]()
    search.open = [Fake(search, taken, *one) for one in candidates]
    for _, candidate in search._turns():
        search.open.remove(candidate)
        search.open += candidate.take(1.0)
    return taken


def test_the_least_estimate_has_the_next_turn_and_what_promises_no_better_plan_has_none():
    found = turns(queue(), ("c", 3.0), ("a", 1.0), ("b", 2.0, 0.0, 2.5), ("d", 2.49))
    assert found == ["a", "b"]  # 2.49 is not better than 2.5 by more than the gap


def test_a_turn_may_close_other_candidates():
    """So a variant that needs no less memory than one that cannot fit has no turn."""
    search, taken = queue(), list[str]()

    def take(limit_s):
        search.open = [one for one in search.open if one is not hopeless]
        return [Fake(search, taken, "part", 2.0)]

    first, hopeless = Fake(search, taken, "first", 1.0), Fake(search, taken, "hopeless", 3.0)
    first.take = take
    search.open = [first, hopeless]
    search._go_through()
    assert taken == ["part"]


def test_without_a_plan_all_have_turns():
    assert turns(queue(), ("b", math.inf, 2.0), ("a", 1.0, 3.0), ("c", math.inf, 3.0)) == ["a", "b", "c"]


def test_without_a_plan_the_fastest_that_seems_to_fit_comes_first_in_the_time_besides():
    search = queue()
    every = [(str(n), float(n), 2.0 * GIB - n if n % 2 else 100.0) for n in range(40)]
    taken = turns(search, *every)
    assert taken[:15] == [str(n) for n in range(15)]
    assert taken[15:] == [str(n) for n in (*range(16, 40, 2), 39, 37, 35)]
    assert search.trials.clock.now_s == 30.0


def test_a_users_limit_holds_without_a_plan():
    search, clock = queue(time_limit_s=20.0), WorkClock()
    search.trials.clock = clock
    search.trials.shared.deadline = Deadline.after(20.0, clock)
    every = [(str(n), float(n), 2.0 * GIB - n if n % 2 else 100.0) for n in range(60)]
    taken = turns(search, *every)
    assert taken == [str(n) for n in (*range(11), *range(12, 30, 2))]
    search.trials.extend(1.0)
    assert search.trials.deadline.is_over


def test_a_users_limit_is_used_up_with_a_good_plan():
    search, clock = queue(time_limit_s=20.0), WorkClock()
    search.trials.clock, search.trials.shared.best = clock, plan(1.5)
    search.trials.shared.deadline = Deadline.after(20.0, clock)
    assert turns(search, *((str(n), 1.0 + n / 100) for n in range(30))) == [str(n) for n in range(20)]


def test_of_the_same_memory_rewrites_come_before_what_is_not_rewritten_yet(monkeypatch):
    """A variant's meshes hold no less than the rewrite that saves most there."""
    search = queue()
    small, most = rewrites(search, monkeypatch, 15, 20)
    other = OnMesh(most.mesh.solved, (16, 4))
    other.solved.baseline.estimates_s[16, 4] = 0.5
    search.trials._nearest[STEP, frozenset()] = SimpleNamespace(peak=SimpleNamespace(num_bytes=2.0 * GIB))
    search.open = [other, small, most]
    assert other.least_bytes == most.least_bytes < small.least_bytes
    assert search._most_likely() == (search, most)


def test_under_a_lower_cap_what_was_expected_to_be_faster_than_the_plan_before_is_ordered_by_its_memory():
    search = queue()
    search.floor_s = 2.0
    every = [("fast", 0.5, 9.0), ("slow", 3.0, 1.0), ("small", 1.5, 3.0), ("as fast", 2.0, 5.0)]
    assert turns(search, *every) == ["small", "as fast", "fast", "slow"]


@pytest.mark.parametrize(("solutions_s", "told_s"), [((3.0, 2.0), 2.0), ((), 1.0)])
def test_a_solved_variant_tells_its_seconds_or_their_lower_bound(monkeypatch, solutions_s, told_s):
    search, told, on_mesh = queue(), list[float](), SimpleNamespace(shape=(8, 8))
    search.variants = SimpleNamespace(took=lambda variant, seconds: told.append(seconds))
    uncapped = tuple(UncappedSolution(on_mesh, (), seconds) for seconds in solutions_s)
    baseline = SimpleNamespace(uncapped=uncapped, found=(), floors_s={(8, 8): 1.0})
    monkeypatch.setattr(search, "_on_meshes", lambda variant: (Prepared(), [on_mesh]))
    monkeypatch.setattr(search.trials, "baseline", lambda *given: baseline)
    monkeypatch.setattr(search, "_meshes", lambda *given: [])
    assert search._solved(Variant(2), 1.0) == []
    assert told == [told_s]


@pytest.mark.parametrize(("plan_s", "num_turns"), [(99 * POOR, 15), (101 * POOR, 30)])
def test_with_a_plan_the_search_ends_in_time_unless_others_promise_a_far_faster_one(plan_s, num_turns):
    search = queue()
    every = [("first", 0.0, 0.0, plan_s), *((str(n), 100.0 + n / 100) for n in range(40))]
    assert len(turns(search, *every)) == num_turns


def solved(search, floors_s=None):
    baseline = SimpleNamespace(
        step_problem=Prepared(),
        floors_s=floors_s or {},
        estimates_s=floors_s or {},
        deferred=(),
        on_meshes=(),
    )
    certificate = Certificate(search.trials, baseline)
    fastest = UncappedSolution(SimpleNamespace(shape=(8, 8)), (), 1.0)
    return SolvedVariant(search.trials, certificate, None, Variant(1), baseline, None, fastest)


def rewrites(search, monkeypatch, *savings, found=()):
    """Rewrites of 1 s each on one mesh, where 10 bytes are missing. Each saves so many bytes. The results are a bound and
    the needed memory."""
    on_mesh = SimpleNamespace(shape=(8, 8))
    mesh = OnMesh(solved(search), (8, 8), missing_bytes=10.0)
    uncapped = UncappedSolution(on_mesh, (), 1.0)
    mesh.solved.rewrites = [
        OfRewrite(mesh, Rewrite(uncapped, frozenset({(n,)}), 1.0, 0.0, float(saved), float(saved)))
        for n, saved in enumerate(savings)
    ]
    results = iter(found)

    def improve(one, limit_s):
        bound_s, needed_bytes = next(results)
        monkeypatch.setattr(Trials, "needed_bytes", lambda trials, step_problem: needed_bytes)
        return mesh.solved.baseline.step_problem, bound_s

    monkeypatch.setattr(OfRewrite, "_improve", improve)
    return mesh.solved.rewrites


def test_a_rewrite_that_missed_rules_out_those_that_save_little_more(monkeypatch):
    every = rewrites(queue(), monkeypatch, 10, 9, 29, 30, found=[(0.5, GIB + 20.0)])
    assert [one.saves_enough for one in every] == [True, False, True, True]
    every[0].take(1.0)
    assert [one.saves_enough for one in every] == [False, False, False, True]
    assert [one.estimate_s for one in every] == [math.inf, math.inf, math.inf, 1.0]
    assert every[0].least_bytes == math.inf  # it comes last


def test_a_rewrite_that_missed_besides_a_plan_rules_out_none(monkeypatch):
    """Other strategies may fit that are slower than the plan."""
    search = queue()
    first, other = rewrites(search, monkeypatch, 20, 15, found=[(0.5, GIB + 20.0)])
    search.trials.shared.best = plan(1.5)
    first.take(1.0)
    assert (first.estimate_s, other.estimate_s) == (math.inf, 1.0)


def test_the_rewrite_that_saves_most_has_a_turn_in_any_case(monkeypatch):
    first, less, most = rewrites(queue(), monkeypatch, 20, 29, 30, found=[(0.5, math.inf)])
    first.take(1.0)  # it misses by an unknown number of bytes
    assert MISSES_BY * GIB > 10.0
    assert (less.estimate_s, most.estimate_s) == (math.inf, 1.0)


def test_a_plan_brings_back_the_rewrites_that_a_miss_ruled_out(monkeypatch):
    """Strategies for one that saves less may be faster than the plan."""
    search = queue()
    first, less, most = rewrites(search, monkeypatch, 20, 15, 60, found=[(0.5, GIB + 20.0)])
    first.take(1.0)
    assert (less.estimate_s, most.estimate_s) == (math.inf, 1.0)
    search.trials.shared.best = plan(1.5)
    assert less.estimate_s == 1.0


@pytest.mark.parametrize(("plan_s", "is_first"), [(math.inf, True), (100.0, False)])
def test_a_rewrite_that_saves_enough_comes_first_until_there_is_a_plan(monkeypatch, plan_s, is_first):
    search = queue()
    fast, enough = search.open = rewrites(search, monkeypatch, 5, 10)
    enough.rewrite = replace(enough.rewrite, cost_s=1.5)
    if plan_s < math.inf:
        search.trials.shared.best = plan(plan_s)
    assert search._most_promising() == (search, enough if is_first else fast)


def test_a_rewrite_that_leaves_another_moment_over_the_cap_does_not_come_first(monkeypatch):
    search = queue()
    fast, elsewhere = search.open = rewrites(search, monkeypatch, 5, 10)
    elsewhere.rewrite = replace(elsewhere.rewrite, cost_s=1.5, relief_bytes=9.0)
    assert search._most_promising() == (search, fast)


def test_a_rewrite_that_seems_to_fit_nowhere_has_no_estimate(monkeypatch):
    one, other = rewrites(queue(), monkeypatch, 20, 30)
    one.rewrite = replace(one.rewrite, cost_s=math.inf)
    assert (one.estimate_s, other.estimate_s) == (math.inf, 1.0)


def test_without_a_plan_a_rewrite_has_further_turns_of_twice_the_time_each(monkeypatch):
    """At a higher estimate, until it is proven that nothing fits or the search ends before its time."""
    search = queue()
    (only,) = rewrites(search, monkeypatch, 20, found=[(0.5, math.inf), (2.0, math.inf), (2.0, math.inf)])
    limits, improve = [], OfRewrite._improve

    def noted(one, limit_s):
        limits.append(limit_s)
        search.trials.clock.spend(limit_s if len(limits) < 3 else 0.1)
        return improve(one, limit_s)

    monkeypatch.setattr(OfRewrite, "_improve", noted)
    assert only.take(1.0) == [only]
    assert only.estimate_s == AGAIN
    assert only.take(1.0) == [only]
    assert only.estimate_s == 2.0 * AGAIN
    assert only.take(1.0) == []
    assert limits == [1.0, 2.0, 4.0]


def test_without_a_plan_a_rewrite_that_was_too_large_has_one_more_turn(monkeypatch):
    (only,) = rewrites(queue(), monkeypatch, 20, found=[(0.5, GIB + 10.0), (0.5, GIB + 10.0)])
    assert only.take(1.0) == [only]
    assert only.estimate_s == math.inf
    assert only.take(1.0) == []


def test_a_rewrite_that_is_proven_too_large_rules_out_those_that_cannot_save_enough_either(monkeypatch):
    first, most = rewrites(queue(), monkeypatch, 20, 30, found=[(math.inf, GIB + 15.0)])
    assert first.take(1.0) == []
    assert most.estimate_s == math.inf


@pytest.mark.parametrize(("bound_s", "error_s"), [(0.5, 0.44), (4.0, 3.0)])
def test_a_rewrite_that_is_slower_than_its_estimate_raises_those_of_others_half_of_the_way(
    monkeypatch, bound_s, error_s
):
    """There is a plan of 1.44 s, and nothing faster is found of a rewrite of an estimated second. It leaves 4 of the 10
    missing bytes to other strategies, and the others leave 2 and none."""
    search = queue()
    search.trials.shared.best = plan(1.44)
    first, other, enough = rewrites(search, monkeypatch, 6, 8, 10, found=[(bound_s, math.inf)])
    assert first.estimate_s == other.estimate_s == 1.0
    first.take(1.0)
    assert other.estimate_s == pytest.approx(1.0 + 2 / 4 * error_s / 2)
    assert enough.estimate_s == 1.0


@pytest.mark.parametrize(("found_s", "error_s"), [(1.02, 0.02), (1.4, (0.22 + 0.4) / 2)])
def test_a_plan_lowers_the_estimates_of_others_to_its_own_error_or_raises_them_half_of_the_way(
    monkeypatch, found_s, error_s
):
    search = queue()
    search.trials.shared.best = plan(1.44)
    every = rewrites(search, monkeypatch, 6, 6, 6, found=[(0.5, math.inf), (0.5, math.inf)])
    first, second, other = every
    first.take(1.0)
    assert other.estimate_s == pytest.approx(1.22)
    improve = OfRewrite._improve

    def found(one, limit_s):
        search.trials.shared.best = plan(found_s)
        return improve(one, limit_s)

    monkeypatch.setattr(OfRewrite, "_improve", found)
    second.take(1.0)
    assert other.estimate_s == pytest.approx(1.0 + error_s)


def test_another_mesh_is_expected_to_need_what_saves_as_much_on_the_first_one(monkeypatch):
    search = queue()
    one, two = rewrites(search, monkeypatch, 60, 40)
    of_variant = one.mesh.solved
    one.rewrite, two.rewrite = (
        Rewrite(one.rewrite.uncapped, frozenset(), 1.3, more_s, saved)
        for more_s, saved in ((0.2, 60.0), (0.1, 40.0))
    )
    held = SimpleNamespace(peak=lambda labels: SimpleNamespace(num_bytes=GIB + 50.0))
    uncapped = UncappedSolution(SimpleNamespace(memory=held), (), 1.0)
    other = OnMesh(of_variant, (64,), uncapped)
    of_variant.residuals_s = lambda num_bytes: 0.0
    assert other.estimate_s == 1.0  # nothing is estimated yet
    of_variant.is_estimated = True
    assert other.estimate_s == 1.2
    two.rewrite = Rewrite(one.rewrite.uncapped, frozenset(), 1.35, 0.1, 60.0, 60.0, frozenset({(0,)}))
    assert other.estimate_s == 1.2  # to offload costs 0.35 s
    of_variant.rewrites = []
    assert other.estimate_s == math.inf


@pytest.mark.parametrize(
    ("options", "finer"), [({}, [(2, 4, 8), (8, 2, 4)]), ({"mesh": (8, 8)}, [])], ids=["any", "asked"]
)
def test_the_best_plans_step_is_tried_on_the_other_meshes_and_on_splits_of_its_own(
    monkeypatch, options, finer
):
    monkeypatch.setattr(Trials, "owns", lambda trials, found: True)
    search = queue(**options)
    search.certificate = solved(search).certificate
    search._meet_neighbours(plan(1.0))
    shapes = [one.shape for one in search.open]
    assert shapes[0] == (8, 8)
    assert set(shapes) == {*search.trials.shapes, *finer}
    better = plan(0.9, (2, 4, 8))
    search.tried_elsewhere.add((better.step_problem, (64,)))
    search._meet_neighbours(better)
    own = [one.shape for one in search.open if one.plan is better]
    assert own[0] == (2, 4, 8)
    assert (64,) not in own
    assert [one.shape for one in search.open if one.plan is not better] == shapes  # another step's stay open
    again = plan(0.8, (2, 4, 8), better.step_problem)
    search._meet_neighbours(again)
    assert [one.shape for one in search.open if one.plan is again] == own
    assert better not in [one.plan for one in search.open]


def test_neighbours_come_after_all_others_that_promise_a_better_plan():
    search, taken = queue(), []
    first = solved(search, {(8, 8): 0.5, (64,): 0.1})
    search.trials.shared.best = plan(1.0)
    search.trials.best.communication_s = 0.5
    neighbour = OfPlan(search.trials, first.certificate, search.trials.best, (64,))
    search.open = [neighbour, Fake(search, taken, "other", 0.9)]
    assert neighbour.estimate_s < 0.9
    assert search._most_promising() == (search, search.open[1])
    search.open.pop()
    assert search._most_promising() == (search, neighbour)


@pytest.mark.parametrize(("more_s", "has_turn"), [(0.2, True), (0.5, False), (-math.inf, True)])
def test_another_form_has_a_turn_if_its_estimate_is_below_the_best_plan(more_s, has_turn):
    search, begun = queue(), []
    first = solved(search, {(8, 8): 0.5, (64,): 0.7}).baseline
    form = OfForm(first, SimpleNamespace(more_s=more_s), begun.append)
    assert form.estimate_s == pytest.approx(0.5 + more_s)
    search.trials.shared.best = plan(0.9)
    search.open = [form]
    assert search._most_promising() == ((search, form) if has_turn else None)
    assert not form.take(1.0)
    assert begun == [form.form]


def test_a_plan_on_another_mesh_is_expected_halfway_between_its_time_and_its_bound():
    search = queue()
    first = solved(search, {(8, 8): 0.5, (64,): 0.4, (2, 32): 0.9})
    found = plan(1.0)
    found.communication_s = 0.2  # computation takes 0.8 s on any mesh
    assert OfPlan(search.trials, first.certificate, found, (64,)).estimate_s == pytest.approx(0.9)
    assert OfPlan(search.trials, first.certificate, found, (2, 32)).estimate_s == pytest.approx(0.95)


def test_recomputation_may_be_faster_than_a_plan_though_nothing_is_missing():
    """To write and read residuals takes time. Without a plan, that does not order meshes."""
    search = queue()
    held = SimpleNamespace(peak=lambda labels: SimpleNamespace(num_bytes=1e9))
    uncapped = UncappedSolution(SimpleNamespace(memory=held), (), 1.0)
    on_mesh = OnMesh(solved(search), (64,), uncapped)
    assert on_mesh.estimate_s == 1.0
    search.trials.shared.best = plan(1.0)
    assert on_mesh.estimate_s < 1.0
    on_mesh.solved.is_estimated = True  # none of the rewrites there saves time
    on_mesh.solved.relief_s = lambda uncapped: 0.0
    assert on_mesh.estimate_s == 1.0


def test_a_plans_step_on_a_finer_mesh_opens_that_mesh_in_its_first_turn_alone(monkeypatch):
    search, shape = queue(), (4, 4, 4)
    search.trials.shared.best = plan(1.0, shape=(2, 32))
    first = solved(search, {shape: 0.5})
    candidate = OfPlan(search.trials, first.certificate, search.trials.best, shape, first)

    def improve(step_problem, on_mesh, limit_s, known):
        search.trials.clock.spend(limit_s)
        return 0.5, True

    monkeypatch.setattr(search.trials, "put_on", lambda step_problem, shape: SimpleNamespace(shape=shape))
    monkeypatch.setattr(search.trials, "improve", improve)
    monkeypatch.setattr(first.certificate, "known", lambda step_problem, shape: Known())
    opened, again = candidate.take(1.0)
    assert (opened.shape, again) == (shape, candidate)
    assert candidate.take(1.0) == [candidate]


def test_a_plans_seconds_are_computed_once():
    """Each candidate is compared with the best plan."""
    asked, device = list[object](), SimpleNamespace(overlap=0.5)
    on_mesh = SimpleNamespace(cost_s=lambda labels, device: asked.append(device) or 2.0)
    found = Found(Prepared(), on_mesh, (), GIB, device)
    assert found.cost_s == found.cost_s == 2.0
    assert asked == [device]
