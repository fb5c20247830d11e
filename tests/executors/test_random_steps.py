"""Some of what `benchmarks/random_steps.py` tries by the hundred: drawn steps, meshes and plans."""

import jax
import pytest

from tests.executors.trial import Trial
from tests.zoo.drawn import Dice, draw_step

SEEDS = (3,)
"""A fastest plan, which compiles fast; `test_numerics` runs smallest and drawn ones."""

MORE_SEEDS = (0, 1, 2, *range(4, 12))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)]
)
def test_many_devices_come_to_one_devices_numbers(seed):
    Trial.of(seed).planned().assert_numbers_equal()


def test_a_seed_draws_one_step():
    texts = set()
    for _ in range(2):
        case = draw_step(Dice(3)).case()
        texts.add(str(jax.make_jaxpr(case.step)(*case.abstract_args())))
    assert len(texts) == 1
