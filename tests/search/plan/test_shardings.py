"""What the executor is told of a plan."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.step_problem import StepProblem


def test_a_barrier_waits_for_a_value_as_its_first_reader_has_it():
    """As it is made, it would be reduced whole, for the barrier alone."""

    def step(w, x):
        gradient = lax.dot_general(x, x, (((0,), (0,)), ((), ())))
        held = lax.optimization_barrier((x, gradient))[0]
        return w - 0.1 * gradient, jnp.sum(jnp.tanh(held))

    shapes = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    traced, cluster, pins = (
        trace(step, *shapes),
        parse_cluster("8xH100-80GB"),
        {"w": P("data"), "x": P("data")},
    )
    on_mesh = StepProblem.of(traced, list(map(str, pins.values())), cluster.device).on(cluster, (8,))
    solution, _ = on_mesh.fitting(on_mesh.pinned(pins), 1 << 40, 5.0)
    sharding = step_sharding(on_mesh.memory.costed, solution.labels)
    names = [op.name for op in traced.graph.ops]
    barrier, reader = names.index("optimization_barrier"), names.index("mul")
    operand = traced.graph.ops[reader].inputs.index(traced.graph.ops[barrier].inputs[1])
    waits = sharding.reshards["operand", (barrier,), 1]
    assert [s.kind for s in waits.path] == ["reduce-scatter"]
    assert waits == sharding.reshards["operand", (reader,), operand]
