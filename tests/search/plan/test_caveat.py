"""Predicted times on a cluster that stands for no real machine say so."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.hardware import parse_cluster

W, X = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


def step(w, x):
    def loss(w):
        return jnp.sum(jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0] ** 2)

    return w - jax.grad(loss)(w)


OPTIONS = [
    {},
    {"stages": 2, "microbatches": 2, "executor": "mpmd"},
    {"stages": 2, "microbatches": 2, "executor": "spmd"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["jit", "mpmd", "spmd"])
def test_a_printed_time_of_simulated_devices_is_called_made_up(options):
    plan = autoshard.search(step, W, X, cluster="2xCPU", **options)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("predicted step time"))
    assert line.endswith(" (made up: 2xCPU stands for no real machine)")


def test_a_printed_time_of_gpus_has_no_caveat():
    assert "made up" not in str(autoshard.search(step, W, X, cluster="2xH100-80GB"))


def test_measured_cpus_are_a_real_machine():
    sources = ("device.flops", "measured on 8 x cpu"), ("device.cores", "not measured: preset CPU: invented")
    assert replace(parse_cluster("8xCPU"), sources=sources).caveat == ""
