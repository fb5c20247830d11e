"""A plan for another step: the message says how this step differs, and nothing that is not known."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.trace import trace
from autoshard.search.plan.plan import Estimates, Plan, Sharding
from autoshard.search.plan.recognition import check_is_for, outlined
from autoshard.search.problem.fingerprint import fingerprint


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2)


def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}


def with_accuracy(params, batch):
    params, metrics = step(params, batch)
    return params, {**metrics, "accuracy": jnp.mean(batch["x"])}


def without_loss(params, batch):
    return step(params, batch)[0], {}


def with_other_loss(params, batch):
    params, metrics = step(params, batch)
    return params, {"loss": metrics["loss"].astype(jnp.bfloat16)}


def renamed(state, batch):
    return step(state, batch)


def frozen(params, batch):
    new, metrics = step(params, batch)
    return {"down": new["down"]}, metrics


def squared(params, batch):
    params, metrics = step(params, batch)
    return params, {"loss": metrics["loss"] ** 2}


def shapes(dtype="float32", batch=64, **more):
    params = {"down": (8, 4), "up": (16, 8), **more}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in params.items()}
    return params, {"x": jax.ShapeDtypeStruct((batch, 16), dtype)}


def plan_for(traced):
    return Plan(
        step=traced.name,
        fingerprint=fingerprint(traced),
        jax="0.12",
        cluster={},
        memory_bytes=1,
        executor="jit",
        microbatches=1,
        retention={},
        shardings=(Sharding({"data": 8}, {}, {}, {}),),
        estimates=Estimates(step_s=1.0, peak_bytes=1),
        outline=outlined(traced),
    )


def refusal(old, new):
    """The message's words on the difference between two steps, given as (function, arguments)."""
    (before, given), (after, args) = old, new
    plan, traced = plan_for(trace(before, *given)), trace(after, *args)
    with pytest.raises(PlanError) as caught:
        check_is_for(Plan.from_json(plan.to_json()), traced, "p.json")
    was_called = "" if before.__name__ == after.__name__ else f", {before.__name__!r}"
    start = f"p.json was made for another step{was_called}. In {after.__name__!r}, "
    said = str(caught.value)
    assert (said[: len(start)], said[-28:]) == (start, ". Search again for this step")
    return said[len(start) : -28]


def test_a_batch_of_another_size():
    said = refusal((step, shapes()), (step, shapes(batch=128)))
    assert said == "batch['x'] is float32[128,16] instead of float32[64,16]"


def test_another_dtype():
    said = refusal((step, shapes()), (step, shapes("bfloat16")))
    assert said.startswith(
        "params['down'] is bfloat16[8,4] instead of float32[8,4], params['up'] is bfloat16[16,8] instead of float32[16,8], "
        "batch['x'] is bfloat16[64,16] instead of float32[64,16]; result[1]['loss'] is bfloat16[] instead of float32[]"
    )


def test_another_leaf_in_the_state():
    said = refusal((step, shapes()), (step, shapes(scale=(4,))))
    assert said.startswith("it takes 1 argument more: params['scale'] (float32[4])")
    said = refusal((step, shapes(scale=(4,))), (step, shapes()))
    assert said.startswith("it takes 1 argument fewer: params['scale'] (float32[4])")


def test_many_other_leaves_are_counted():
    said = refusal((step, shapes()), (step, shapes(**{f"w{i}": (4,) for i in range(9)})))
    assert said.startswith("it takes 9 arguments more: params['w0'] (float32[4]), ")
    assert "params['w3'] (float32[4]) and 5 more" in said


def test_another_number_of_results():
    said = refusal((step, shapes()), (with_accuracy, shapes()))
    assert said.startswith("it returns 1 result more: result[1]['accuracy'] (float32[]); it has ")
    said = refusal((step, shapes()), (without_loss, shapes()))
    assert said.startswith("it returns 1 result fewer: result[1]['loss'] (float32[])")


def test_a_result_of_another_type():
    said = refusal((step, shapes()), (with_other_loss, shapes()))
    assert said.startswith("result[1]['loss'] is bfloat16[] instead of float32[]")


def test_arguments_of_other_names():
    said = refusal((step, shapes()), (renamed, shapes()))
    assert said == (
        "arguments have other names: state['down'] is called params['down'] there, "
        "state['up'] is called params['up'] there"
    )


def test_state_that_is_no_longer_returned():
    said = refusal((step, shapes()), (frozen, shapes()))
    assert said.startswith("the role of params['up'] is frozen instead of parameter")


def test_other_ops():
    assert refusal((step, shapes()), (squared, shapes())) == (
        "it has 2 integer_pow instead of 1"
        if "integer_pow" in outlined(trace(step, *shapes())).ops
        else "it has 2 square instead of 1"
    )


def test_ops_that_differ_in_their_parameters_alone():
    def summed(axis):
        def step(x):
            return jnp.sum(x, axis)

        return step

    x = (jax.ShapeDtypeStruct((4, 4), "float32"),)
    said = refusal((summed(0), x), (summed(1), x))
    assert (
        said
        == "arguments, results and the number of ops are as there; shapes, parameters or the order of ops differ"
    )


def test_a_file_without_an_outline_says_so():
    plan = replace(plan_for(trace(step, *shapes())), outline=None)
    with pytest.raises(PlanError, match="the plan has no outline of that one to compare it with"):
        check_is_for(Plan.from_json(plan.to_json()), trace(step, *shapes(batch=128)), "p.json")
