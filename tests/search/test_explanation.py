"""Why a plan decides as it does: prices are those of plans made otherwise, and each reason is the right one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver, explanation
from autoshard.search.explained_memory import MemoryPrices
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.explained import CHEAPER_ELSEWHERE, NOT_POSSIBLE, TIE, Explanation
from autoshard.search.result import SearchResult

CLUSTER = parse_cluster("4xH100-80GB")
PLENTY_BYTES = 8 << 30


@functools.cache
def step() -> Step:
    """A layer so wide that its gradient is dear to sum, and a bias that nothing divides."""

    def train_step(w, b, x):
        def loss(w, b):
            return jnp.mean(jnp.tanh(x @ w) ** 2) + jnp.mean(b**2)

        dw, db = jax.grad(loss, (0, 1))(w, b)
        return w - 0.1 * dw, b - 0.1 * db

    shapes = ((4096, 4096), (7,), (64, 4096))
    return trace(train_step, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))


@functools.cache
def found(memory_bytes: int = PLENTY_BYTES, pin: tuple[str, P] | None = None) -> SearchResult:
    pins = dict([pin]) if pin else None
    options = Options(memory_bytes, (4,), pins, remat="never", microbatches=1, offload="never")
    return driver.find(step(), CLUSTER, options)


@functools.cache
def explained(name: str, memory_bytes: int = PLENTY_BYTES, pin: tuple[str, P] | None = None) -> Explanation:
    return explanation.explain(found(memory_bytes, pin), name)


def all_costs_s() -> np.ndarray:
    """[labels of each node]: the cost of every assignment there is."""
    problem = found().on_mesh.problem
    total = np.zeros(problem.num_labels)
    ones = [1] * total.ndim
    for node, cost in enumerate(problem.node_cost_s):
        total += cost.reshape([*ones[:node], -1, *ones[node + 1 :]])
    for edge in problem.edges:
        turned = edge if edge.u < edge.v else edge.transposed()
        shape = [n if at in (edge.u, edge.v) else 1 for at, n in enumerate(problem.num_labels)]
        total += turned.cost_s.reshape(shape)
    return total


NAMES = ("w", "x", "forward dot_general", "backward transpose", "x -> backward")


@pytest.mark.parametrize("name", NAMES)
def test_the_price_is_that_of_the_best_of_all_other_assignments(name):
    result, costs_s = found(), all_costs_s()
    node = next(n for n, names in enumerate(result.on_mesh.codec.names) if name in names)
    others_s = np.delete(costs_s, result.chosen[node], axis=node)
    runner_up = explained(name).runner_up
    assert runner_up is not None
    assert runner_up.more_s == pytest.approx(others_s.min() - costs_s.min(), rel=1e-6, abs=1e-12)
    assert runner_up.at_least_s <= runner_up.more_s


@pytest.mark.parametrize("name", ["w", "x"])
def test_the_price_is_that_of_a_search_that_pins_the_runner_up(name):
    runner_up = explained(name).runner_up
    assert runner_up is not None
    pinned = found(pin=(name, read_partition_spec(runner_up.choice))).plan
    more_s = pinned.estimates.step_s - found().plan.estimates.step_s
    assert runner_up.more_s == pytest.approx(more_s, rel=0.02)
    assert runner_up.more_bytes == pinned.estimates.peak_bytes - found().plan.estimates.peak_bytes


def test_the_parts_of_a_price_add_up_to_it():
    runner_up = explained("x").runner_up
    assert runner_up is not None
    assert sum(seconds for _, seconds in runner_up.parts) == pytest.approx(runner_up.more_s)


def test_the_largest_changes_come_first():
    seconds = [abs(change.more_s) for change in explained("w").runner_up.changes]
    assert seconds == sorted(seconds, reverse=True)


def test_what_changes_is_what_a_search_with_the_pin_decides_otherwise():
    runner_up = explained("w").runner_up
    assert runner_up is not None
    there, here = found(pin=("w", read_partition_spec(runner_up.choice))).plan, found().plan
    for change in runner_up.changes:
        if change.name in here.decisions.arguments:
            assert here.decisions.arguments[change.name] == change.this
            assert there.decisions.arguments[change.name] == change.other


def test_what_costs_more_is_cheaper_elsewhere():
    assert explained("w").reason == CHEAPER_ELSEWHERE
    assert "CHEAPER ELSEWHERE" in str(explained("w"))


def test_a_difference_that_the_search_does_not_tell_apart_is_a_tie():
    reason = {name: explained(name).reason for name in NAMES}
    step_s = found().plan.estimates.step_s
    for name in NAMES:
        runner_up = explained(name).runner_up
        assert runner_up is not None
        assert (reason[name] == TIE) == (abs(runner_up.more_s) <= 5e-3 * step_s)
    assert TIE in reason.values()


def test_dimensions_that_do_not_divide_are_named():
    answer = explained("b")
    assert answer.reason == NOT_POSSIBLE
    assert answer.runner_up is None
    assert "dimension 0 of size 7 does not divide by data=4" in answer.rules


def test_a_pin_is_named_and_what_it_costs():
    free = explained("w")
    assert free.runner_up is not None
    pinned = explained("w", pin=("w", read_partition_spec(free.runner_up.choice)))
    assert pinned.reason == NOT_POSSIBLE
    assert any("pinned" in rule for rule in pinned.rules)
    assert pinned.runner_up is not None
    assert pinned.runner_up.choice == free.choice
    assert pinned.runner_up.more_s == pytest.approx(-free.runner_up.more_s)


def test_a_cap_that_rules_out_all_other_choices_is_named():
    """The weights and their gradient, replicated, take twice their size; split, a quarter of that."""
    limit_bytes = found().plan.estimates.peak_bytes
    answer = explained("w", limit_bytes)
    assert answer.runner_up is None
    assert answer.reason == NOT_POSSIBLE
    assert answer.beyond_cap is not None
    assert answer.beyond_cap.more_bytes > 0
    assert any("the cap of" in rule for rule in answer.rules)


def test_more_memory_buys_nothing_if_no_plan_of_any_size_is_faster():
    assert explained("w").more_memory.less_s == 0.0
    assert "would buy nothing" in str(explained("w"))


def test_json_has_no_infinity():
    data = explained("w").to_json()
    assert data["runner_up"]["choice"] == explained("w").runner_up.choice
    assert data["reason"] == CHEAPER_ELSEWHERE


def test_an_unknown_name_is_refused_with_those_near_it():
    with pytest.raises(PlanError, match=r"names no decision of this step. Near it are: .*\bw\b"):
        explanation.explain(found(), "ww")


@functools.cache
def recomputing() -> SearchResult:
    """A plan of a few layers that must recompute to fit."""

    def train_step(layers, x):
        def loss(layers):
            y = x
            for w in layers:
                y = jnp.tanh(jnp.sin(y @ w))
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))

    layers = [jax.ShapeDtypeStruct((256, 256), "float32")] * 3
    step = trace(train_step, layers, jax.ShapeDtypeStruct((1 << 16, 256), "float32"))
    free = Options(PLENTY_BYTES, (4,), time_limit_s=1, microbatches=1, offload="never")
    peak_bytes = driver.find(step, CLUSTER, free).plan.estimates.peak_bytes
    tight = replace(free, memory_bytes=int(0.9 * peak_bytes))
    return driver.find(step, CLUSTER, tight)


def test_what_is_recomputed_would_take_memory_and_save_time():
    result = recomputing()
    answers = [MemoryPrices(result).retention(name) for name in result.plan.retention]
    assert answers
    for answer in answers:
        assert answer is not None
        assert "recomputed" in answer.choice
        assert answer.more_bytes >= 0
        assert answer.more_s <= 0
    assert max(answer.more_bytes for answer in answers if answer) > 0
