"""The state that several trials of one step share."""

import gc
import weakref

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.solver.clock import WorkClock
from autoshard.search.space.trials import Trials
from tests.search.adamw import adamw_chain

STEP = trace(*adamw_chain(num_layers=2, width=64, rows=16))
FORWARD = [frozenset({(i,)}) for i, op in enumerate(STEP.graph.ops) if op.phase is Phase.FORWARD]


def trials():
    marks = [""] * len(STEP.arguments)
    return Trials(STEP, marks, parse_cluster("2xL4"), Options(1 << 30), lambda line: None, WorkClock())


def test_what_recomputes_the_same_is_made_ready_once():
    """It is tried on one mesh after another, and what is proven of it counts whenever it comes up again."""
    tried = trials()
    baseline = tried.made_ready(STEP)
    made = tried.recomputing(baseline, FORWARD[0], frozenset())
    assert tried.recomputing(baseline, FORWARD[0], frozenset()) is made
    assert tried.recomputing(baseline, FORWARD[1], frozenset()) is not made


def test_what_recomputes_has_on_the_host_what_the_plain_step_has():
    tried = trials()
    baseline = tried.made_ready(STEP, frozenset({0}))
    assert tried.recomputing(baseline, FORWARD[0], frozenset()).hosted == {0}


def test_a_step_is_put_on_a_mesh_once_under_lower_caps_too_and_forgotten_with_the_step():
    tried = trials()
    baseline = tried.made_ready(STEP)
    on_mesh = tried.put_on(baseline, (2,))
    lower = tried.under(Options(1 << 20), lambda line: None)
    assert tried.put_on(baseline, (2,)) is lower.put_on(baseline, (2,)) is on_mesh
    assert tried.put_on(tried.made_ready(STEP), (2,)) is not on_mesh
    left = weakref.ref(on_mesh)
    del baseline, on_mesh
    gc.collect()
    assert left() is None
