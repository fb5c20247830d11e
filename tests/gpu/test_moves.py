"""Ops that only move elements: XLA's GPU compiler makes the kernels that are priced."""

import re
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import compile_apart
from autoshard.search.driver import find_as_written
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options

CLUSTER = parse_cluster("1xH100-80GB")
MADE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")
ARRAY = re.compile(r"\bf32\[([\d,]*)\]")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def kernels(step, args):
    """Of each kernel that XLA makes: the bytes of the arrays that it reads, as if whole, and of those that it writes."""
    text = compile_apart(module_bytes(lower(jax.jit(step), args)), CLUSTER).text
    lines = map(MADE.match, text.split("\nENTRY", 1)[1].splitlines())
    sizes, found = dict[str, int](), list[tuple[int, int]]()
    for name, made, kind, operands in (line.groups() for line in lines if line):
        sizes[name] = 4 * sum(prod(map(int, filter(None, dims.split(",")))) for dims in ARRAY.findall(made))
        if kind in ("fusion", "copy", "custom-call"):
            found.append((sum(sizes[o] for o in {*re.findall(r"%([\w.-]+)", operands)}), sizes[name]))
    return found


def priced_bytes(step, args):
    """The bytes that go through memory in the time that the step is estimated to compute."""
    found = find_as_written(trace(step, *args), CLUSTER, Options(CLUSTER.device_memory_limit()))
    return found.plan.estimates.compute_s / pass_s_per_byte(CLUSTER.device)


def gated(x):
    gates, values = jnp.split(x, 2, axis=-1)
    return jnp.tanh(gates) * values


def rotated(x, cosines, sines):
    half = x.shape[-1] // 2
    return x * cosines + jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sines


def interleaved(x, y):
    x, y = x * 2.0, y * 3.0
    return lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))) + lax.pad(y, 0.0, ((1, 0, 1), (0, 0, 0)))


X = array(4096, 8192)
HEADS, ANGLES = array(16, 2048, 16, 128), array(2048, 1, 128)
STEPS = {
    "gated": (gated, (X,)),
    "gradient": (lambda x: jax.grad(lambda x: (gated(x) ** 2).sum())(x), (X,)),
    "rotary": (rotated, (HEADS, ANGLES, ANGLES)),
    "differences": (lambda x: jnp.tanh(x[1:] - x[:-1]), (X,)),
    "rolled": (lambda x: x + jnp.roll(x, 1, axis=0), (X,)),
    "padded": (lambda x: jnp.pad(x, ((0, 4096), (0, 0))) * 2.0, (X,)),
    "joined": (lambda x, y: jnp.concatenate([x * 2.0, jnp.exp(y)]) * 3.0, (X, X)),
    "interleaved": (lambda x, y: interleaved(x, y) * 2.0, (X, X)),
}


@pytest.mark.parametrize("name", STEPS)
def test_elements_move_in_the_one_kernel_that_computes_with_them(name):
    ((read, written),) = kernels(*STEPS[name])
    assert priced_bytes(*STEPS[name]) == pytest.approx(read + written, rel=0.01)


def recurrence(decays, inputs):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, inputs), axis=1)[1]


TIMES = array(16, 256, 8192)
SCANS = {
    "sums": (lambda x: lax.associative_scan(jnp.add, x, axis=1), (TIMES,)),
    "recurrence": (recurrence, (TIMES, TIMES)),
    "gradient": (
        jax.grad(lambda a, x: (recurrence(a, x) ** 2).sum(), argnums=(0, 1)),
        (TIMES, TIMES),
    ),
}


@pytest.mark.parametrize("name", SCANS)
def test_an_associative_scan_takes_no_longer_than_its_kernels_if_they_read_all_of_their_operands(name):
    """They read parts of them, so the price lies between that and writing alone."""
    found = kernels(*SCANS[name])
    written = sum(written for _, written in found)
    assert written < priced_bytes(*SCANS[name]) < written + sum(read for read, _ in found)
