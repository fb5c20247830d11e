"""State in the host's memory changes no number; it is fetched when it is needed, and what is there at a time is bounded."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.graph import Graph, Op, Phase, Role, Step
from autoshard.search.ir.trace import trace
from autoshard.search.memory import offload
from autoshard.search.memory.fetches import WINDOW
from autoshard.search.memory.loop_segments import LoopSegments, segments_site
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.memory.offload import may_rest_on_host, offloaded
from autoshard.search.memory.recompute import recomputed
from tests.search.adamw import adamw_chain
from tests.search.lora import lora_chain

NUM_LAYERS, WIDTH = 6, 128


def make(clip: float | None = None):
    return adamw_chain(NUM_LAYERS, WIDTH, 1024, clip)


def of_roles(step: Step, *roles: Role) -> frozenset[int]:
    return frozenset(i for i, role in may_rest_on_host(step).items() if role in roles)


def hosted(step: Step) -> Graph:
    return offloaded(step, of_roles(step, Role.OPTIMIZER_STATE, Role.PARAMETER)).step.graph


def transfers(graph: Graph, to_host: bool) -> Iterator[tuple[int, Op]]:
    for i, op in enumerate(graph.ops):
        if op.is_transfer and op.result_values[0].is_on_host is to_host:
            yield i, op


def test_what_may_rest_on_the_host():
    step = trace(*make())
    roles = [role for _, role in sorted(may_rest_on_host(step).items())]
    assert roles.count(Role.PARAMETER) == NUM_LAYERS
    assert roles.count(Role.OPTIMIZER_STATE) == 2 * NUM_LAYERS
    assert len(roles) == 3 * NUM_LAYERS  # neither the step's count nor the batch


def test_what_is_handed_on_as_it_was_stays_on_the_device():
    big = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    step = trace(lambda w, x: (w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), w), big, big)
    assert not may_rest_on_host(step)


def handed_back(state, x):
    """The chain with its frozen weights inside of the state."""
    trained, value = LORA[0](state["trained"], state["base"], x)
    return {"trained": trained, "base": state["base"]}, value


LORA = lora_chain(NUM_LAYERS, WIDTH, 1024)


@pytest.mark.parametrize("is_handed_back", [False, True])
def test_frozen_weights_come_for_each_phase_and_never_go(is_handed_back):
    step, state, base, x = LORA
    args = ({"trained": state, "base": base}, x) if is_handed_back else (state, base, x)
    traced = trace(handed_back if is_handed_back else step, *args)
    frozen = of_roles(traced, Role.FROZEN)
    assert len(frozen) == NUM_LAYERS
    graph = offloaded(traced, frozen).step.graph
    phases = [op.phase for _, op in transfers(graph, to_host=False)]
    assert phases == [Phase.FORWARD] * NUM_LAYERS + [Phase.BACKWARD] * (NUM_LAYERS - 1)
    assert not list(transfers(graph, to_host=True))
    fetches = [i for i, _ in transfers(graph, to_host=False)]
    products = [i for i, op in enumerate(graph.ops) if op.name == "dot_general"]
    assert products[0] < fetches[WINDOW + 1]  # layer by layer


@pytest.mark.parametrize("convert", [lambda w: w, lambda w: w.astype(jnp.float32).T.T])
def test_each_phase_converts_the_weights_that_it_fetches(convert):
    """Else the converted weights, which are larger, are on the device from the forward phase to the backward phase."""

    def step(a, base, x):
        def loss(a):
            y = x * a
            for w in base:
                y = jnp.tanh(y @ convert(w))
            return jnp.sum(y**2)

        return a - 0.1 * jax.grad(loss)(a)

    base = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 3
    a, x = jax.ShapeDtypeStruct((256,), jnp.float32), jax.ShapeDtypeStruct((8, 256), jnp.float32)
    traced = trace(step, a, base, x)
    found = offloaded(traced, of_roles(traced, Role.FROZEN))
    graph = found.step.graph
    fetched = [op.phase for _, op in transfers(graph, to_host=False)]
    assert fetched == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3
    made = {v: op for op in graph.ops for v in op.outputs}
    weights = {v for v in made if graph.values[v].shape == (256, 256)}
    held = [v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands if v in weights]
    assert held
    assert all(made[v].phase is Phase.BACKWARD or graph.values[v].is_on_host for v in held)
    for i, op in enumerate(graph.ops):
        for (n,) in found.before([(i,)]):
            assert traced.graph.ops[n].primitive is op.primitive
    converted = {op.outputs[0] for op in traced.graph.ops if op.name == "convert_element_type"}
    waiting = offloaded(traced, of_roles(traced, Role.FROZEN), frozenset(converted)).step.graph
    assert not list(transfers(waiting, to_host=True))


def test_narrower_copies_of_a_weight_stay_on_the_device():
    """They take half of the memory that another fetch would move."""

    def step(a, w, x):
        return a - 0.1 * jax.grad(lambda a: jnp.sum(jnp.tanh((x * a) @ w.astype(jnp.bfloat16))))(a)

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    a, x = jax.ShapeDtypeStruct((256,), jnp.bfloat16), jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    traced = trace(step, a, w, x)
    graph = offloaded(traced, of_roles(traced, Role.FROZEN)).step.graph
    assert [op.phase for _, op in transfers(graph, to_host=False)] == [Phase.FORWARD]


def test_a_fetch_waits_for_sums_of_products_and_not_for_their_terms():
    """The compiler would sum up the devices' terms of each product by themselves before the barrier."""
    step = trace(*LORA)
    graph = offloaded(step, of_roles(step, Role.FROZEN)).step.graph
    made = {v: op for op in graph.ops for v in op.outputs}
    barriers = [op for op in graph.ops if op.name == "optimization_barrier"]
    waited = [made[v].name for op in barriers for v in op.operands if not graph.values[v].is_on_host]
    assert len(waited) > NUM_LAYERS
    assert "dot_general" not in waited


def test_a_stack_of_frozen_weights_comes_slice_by_slice():
    step = trace(*lora_chain(NUM_LAYERS, WIDTH, 1024, is_scanned=True))
    rewritten = offloaded(step, of_roles(step, Role.FROZEN))
    graph = rewritten.step.graph
    assert not [*transfers(graph, to_host=False), *transfers(graph, to_host=True)]
    loops = [(i, op) for i, op in enumerate(graph.ops) if op.name == "scan"]
    assert [op.phase for _, op in loops] == [Phase.FORWARD, Phase.BACKWARD]
    for i, loop in loops:
        (body,) = loop.bodies["jaxpr"]
        (fetch,) = (op for _, op in transfers(body, to_host=False))
        assert fetch.result_values[0].shape == (WIDTH, WIDTH)
        (before,) = step.graph.ops[rewritten.origin[i]].bodies["jaxpr"]
        for n, op in enumerate(body.ops[1:], 1):
            ((_, _, _, place),) = rewritten.before([(i, "jaxpr", 0, n)])
            assert before.ops[place].outputs == op.outputs
        assert not rewritten.before([(i, "jaxpr", 0, 0)])
        cut = segments_site((i,), LoopSegments((2,)))
        assert rewritten.before([cut]) == {(rewritten.origin[i], *cut[1:])}


def test_stacks_of_trained_weights_come_slice_by_slice_and_whole_for_their_update():
    rank = WIDTH // 2
    step = trace(*lora_chain(NUM_LAYERS, WIDTH, 1024, rank=rank, is_scanned=True))
    graph = offloaded(step, of_roles(step, Role.PARAMETER)).step.graph
    for loop in (op for op in graph.ops if op.name == "scan"):
        fetched = [op.result_values[0].shape for _, op in transfers(loop.bodies["jaxpr"][0], to_host=False)]
        assert fetched == [(WIDTH, rank), (rank, WIDTH)]
    for to_host in (False, True):
        copied = [op for _, op in transfers(graph, to_host)]
        assert {op.phase for op in copied} == {Phase.UPDATE}
        assert [op.result_values[0].shape[0] for op in copied] == [NUM_LAYERS] * 2


@pytest.mark.parametrize("clip", [None, 1.0])
def test_state_rests_there_and_returns_there(clip):
    step = trace(*make(clip))
    graph = hosted(step)
    on_host = [graph.values[v].is_on_host for v in graph.inputs]
    for a, r in zip(graph.outputs, step.replaces, strict=True):
        if r is not None:
            assert graph.value(a).is_on_host == on_host[r]
    assert sum(on_host) == 3 * NUM_LAYERS


def test_it_comes_once_for_each_phase_that_reads_it():
    graph = hosted(trace(*make()))
    phases = [op.phase for _, op in transfers(graph, to_host=False)]
    assert phases.count(Phase.FORWARD) == NUM_LAYERS
    assert phases.count(Phase.BACKWARD) == NUM_LAYERS - 1  # nothing is propagated into the batch
    assert phases.count(Phase.UPDATE) == 3 * NUM_LAYERS
    assert len(list(transfers(graph, to_host=True))) == 3 * NUM_LAYERS


def test_updates_stand_between_the_layers_of_the_backward_phase():
    graph = hosted(trace(*make()))
    stored = [i for i, _ in transfers(graph, to_host=True)]
    products = [
        i for i, op in enumerate(graph.ops) if op.name == "dot_general" and op.phase is Phase.BACKWARD
    ]
    done_before = [sum(s < p for s in stored) for p in products]
    assert done_before[-1] >= 3 * (NUM_LAYERS - 1 - WINDOW)


def test_gradients_that_are_clipped_together_wait_for_one_another():
    graph = hosted(trace(*make(clip=1.0)))
    first = min(i for i, _ in transfers(graph, to_host=True))
    assert first > max(i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_more_than_the_window_is_there_at_a_time(clip):
    """Of updates: what waits for nothing but what its barrier holds may run as soon as that is there."""
    graph = hosted(trace(*make(clip)))
    below: dict[int, set[int]] = {}
    fetched: list[int] = []
    for n, op in enumerate(graph.ops):
        waited = set[int]().union(*(below.get(v, set()) for v in op.operands))
        if op.is_transfer and op.result_values[0].is_on_host:
            waited = waited | {n}  # a store is over
        below |= dict.fromkeys(op.outputs, waited)
        if op.is_transfer and op.phase is Phase.UPDATE and not op.result_values[0].is_on_host:
            in_flight = len(fetched) - len(waited)
            assert in_flight < 3 * WINDOW
            fetched.append(n)
    assert fetched


def test_in_microbatches_no_fetch_starts_before_the_gradients_are_there():
    """The compiler starts a copy that waits for nothing as the step begins, and its memory is taken through all of it. Here
    nothing of the backward phase is left outside of the loop."""

    def momentum(weights, moment, x):
        def loss(weights):
            return jnp.sum(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0])

        moment = 0.9 * moment + jax.grad(loss)(weights)
        return weights - moment, moment

    weights = jax.ShapeDtypeStruct((NUM_LAYERS, WIDTH, WIDTH), jnp.float32)
    step = microbatched(trace(momentum, weights, weights, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)), 4)
    graph = offloaded(step, of_roles(step, Role.OPTIMIZER_STATE)).step.graph
    (loop,) = (op for op in graph.ops if op.name == "scan")
    late = set(loop.outputs)
    for op in graph.ops:
        if late.intersection(op.operands):
            late.update(op.outputs)
    fetched = [op for _, op in transfers(graph, to_host=False)]
    assert len(fetched) == 1
    assert all(late.issuperset(op.operands) for op in fetched)


def test_what_holds_a_fetch_back_is_read_behind_its_barrier():
    """Else the compiler strips the barrier of it."""
    step = trace(*make())
    of_batches = offloaded(microbatched(step, 4), of_roles(step, Role.OPTIMIZER_STATE)).step.graph
    for graph in (hosted(step), of_batches):
        assert_read_behind_barriers(graph)


def assert_read_behind_barriers(graph):
    read = {v for op in graph.ops for v in op.operands} | {a for a in graph.outputs if isinstance(a, int)}
    barriers = [op for op in graph.ops if op.name == "optimization_barrier"]
    assert barriers
    assert all(read.issuperset(op.outputs) for op in barriers)


def test_sites_of_the_rewritten_step_are_those_of_the_traced_one():
    step = trace(*make())
    found = offloaded(step, of_roles(step, Role.PARAMETER))
    for i, op in enumerate(found.step.graph.ops):
        for (n,) in found.before([(i,)]):
            assert step.graph.ops[n].primitive is op.primitive
    ops = {site for i in range(len(found.step.graph.ops)) for site in found.before([(i,)])}
    assert ops == {(n,) for n in range(len(step.graph.ops))}


def test_a_recomputing_step_may_rest_on_the_host_too():
    step = trace(*make())
    sites = frozenset(
        (i,) for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD and op.name == "tanh"
    )
    graph = offloaded(recomputed(step, sites), of_roles(step, Role.PARAMETER)).step.graph
    assert sum(op.name == "tanh" for op in graph.ops) > NUM_LAYERS


def test_small_state_stays(monkeypatch):
    step = trace(*make())
    monkeypatch.setattr(offload, "MIN_BYTES", WIDTH * WIDTH * 4 + 1)
    assert not may_rest_on_host(step)


def test_nothing_on_the_host_is_the_step_itself():
    step = trace(*make())
    assert offloaded(step, frozenset()).step is step


def test_residuals_wait_on_the_host():
    step = trace(*make())
    tanhs = [i for i, op in enumerate(step.graph.ops) if op.name == "tanh" and op.phase is Phase.FORWARD]
    made = {v for i in tanhs for v in step.graph.ops[i].outputs}
    graph = offloaded(step, frozenset(), frozenset(made)).step.graph
    stored = {op.inputs[0] for _, op in transfers(graph, to_host=True)}
    assert stored == made
    assert stored.isdisjoint(v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands)


def test_residuals_leave_one_after_the_other():
    """Else the compiler may hold them all until the forward phase is over: who reads one waits until one before it left."""
    step = trace(*make())
    residuals = frozenset(op.outputs[0] for op in step.graph.ops if op.name == "tanh")
    graph = offloaded(step, frozenset(), residuals).step.graph
    made = {v: op for op in graph.ops for v in op.outputs}
    products = [op for op in graph.ops if op.name == "dot_general" and op.phase is Phase.FORWARD]
    for n, op in enumerate(products[WINDOW + 1 :], WINDOW + 1):
        barrier = made[op.operands[0]]
        assert barrier.name == "optimization_barrier"
        left = [made[v] for v in barrier.operands if graph.values[v].is_on_host]
        assert [o.operands[0] for o in left if o.is_transfer] == [made_by_tanh(graph, n - 1 - WINDOW)]


def made_by_tanh(graph, n):
    return [op.outputs[0] for op in graph.ops if op.name == "tanh"][n]
