"""Why a pipeline is as it is: its neighbours' prices are those of searches that ask for them."""

import functools

import jax
import jax.numpy as jnp
import pytest

import autoshard

DEPTH, WIDTH, ROWS = 4, 512, 256


def train_step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


SHAPES = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * DEPTH,
    jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"),
)
OPTIONS = {"cluster": "4xL4", "stages": 2, "schedule": "1f1b", "microbatches": 4, "executor": "mpmd"}


@functools.cache
def searched(**options):
    return autoshard.search(train_step, *SHAPES, **OPTIONS | options, verify="never")


def explained(name):
    return autoshard.explain(train_step, *SHAPES, plan=searched(), name=name)


@pytest.mark.parametrize("name", ["schedule", "microbatches"])
def test_the_price_of_a_neighbour_is_that_of_a_search_which_asks_for_it(name):
    found = explained(name)
    forced = found.runner_up.choice.removesuffix(" microbatches")
    other = searched(**{name: int(forced) if name == "microbatches" else forced})
    assert found.runner_up.more_s == pytest.approx(other.estimates.step_s - searched().estimates.step_s)
    assert found.runner_up.more_bytes == other.estimates.peak_bytes - searched().estimates.peak_bytes
    later = [one.more_s for one in found.others if one.more_s is not None]
    assert all(found.runner_up.more_s <= more_s for more_s in later)
    assert "10% more memory" in str(found)


def test_one_program_is_a_neighbour_of_the_stages():
    """On 4 L4s this step is faster without a pipeline, which the plan was asked for."""
    found = explained("stages")
    alone = autoshard.search(train_step, *SHAPES, cluster="4xL4", stages=1, verify="never")
    assert found.reason == "improvable"
    assert found.runner_up.choice == "one program"
    assert found.runner_up.more_s == pytest.approx(alone.estimates.step_s - searched().estimates.step_s)


def test_an_argument_rests_on_the_stage_of_the_layer_that_reads_it():
    places = [explained(f"weights[{n}]").place for n in range(DEPTH)]
    assert [one.stage for one in places] == [0, 0, 1, 1]
    assert all(one.mesh == dict(searched().mesh_of(searched().stages[one.stage])) for one in places)
    assert "rests on stage 1" in str(explained("weights[3]"))


def test_an_unknown_name():
    with pytest.raises(
        autoshard.PlanError, match="wanted stages, schedule, microbatches or the path of an argument"
    ):
        explained("weights[9]")
