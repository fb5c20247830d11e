"""Whether pipelines come to one device's numbers: every schedule, both executors, several numbers of stages and
microbatches, models of several kinds; three steps in float64, on 8 simulated devices.

A line for each: what was run, and `alike` if state and metrics are one device's but for the order of sums (as in the tests:
to a relative 1e-9). Stages are cut where a search cuts them, or unequally, then on submeshes of unequal sizes too where no
stages share a worker. What a schedule refuses is said. Programs that were compiled before are taken from a cache on disk.
There are eight turns: in each, all models meet all schedules, with other numbers; in the first, searched pipelines and those
that are one program come besides.

    python -m benchmarks.pipeline_numerics                         # all; an hour on two cores
    python -m benchmarks.pipeline_numerics vit t5 --turns 4 5      # these models, these turns
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cost_model.errors import InputError
from autoshard.search.pipeline.schedules.registry import FAMILIES
from tests import zoo
from tests.executors.agreement import Reference, assert_equal, run_steps
from tests.executors.pipelines import pipelined, schedule_of, trained
from tests.simulated import simulate_devices
from tests.zoo import Case

NUM_STEPS = 3

MODELS: dict[str, Callable[..., Case]] = {
    "gpt": partial(zoo.make_gpt_linen, num_layers=2, hidden=16, heads=2),  # tied embeddings, dropout
    "gpt nnx": partial(zoo.make_gpt_nnx_optimizer, num_layers=2, hidden=16, heads=2),
    "gpt scan": partial(zoo.make_gpt_scan, num_layers=4, hidden=16, heads=2, vocab=16),
    "vit": partial(zoo.make_vit, num_layers=2, hidden=16, heads=2, image=8),
    "t5": partial(zoo.make_t5, num_layers=1, hidden=16, heads=2),
    "resnet": partial(zoo.make_resnet, batch_norm=False),
    "moe": partial(zoo.make_moe, num_layers=1, hidden=16, heads=2),
}

NUMBERS = (
    ((2, 4, True), (2, 8, False), (4, 4, False), (4, 8, True)),
    ((2, 4, False), (2, 8, True), (4, 4, True), (4, 8, False)),
)
"""Stages, microbatches, and whether the stages are equal; in either half any two of these meet."""

UNEQUAL = {2: (0.3,), 4: (0.1, 0.3, 0.8)}
"""By number of stages, the shares of the forward phase behind which they are cut."""

TURNS = range(8)

SIZES = {2: (6, 2), 4: (4, 2, 1, 1)}
"""Likewise, devices of each."""

MESHES = {2: ((4, 1), (2, 2), (1, 4)), 4: ((2, 1), (1, 2))}
"""Of stages in one program, by how many there are."""


Run = tuple[str, Callable[[], Any]]
"""What is said of it, and what runs."""


def of_programs(single: Reference, turn: int, shift: int) -> Iterator[Run]:
    """Pipelines with a program per stage, under each schedule; the numbers are others in each turn."""
    half = NUMBERS[turn // 4]
    for n, name in enumerate(FAMILIES):
        stages, microbatches, is_equal = half[(n + shift + turn) % 4]
        yield (
            f"{name:16} {stages} stages, {'equal' if is_equal else 'unequal':7} {microbatches} microbatches",
            partial(run_programs, single, name, stages, microbatches, is_equal),
        )


def run_programs(single: Reference, name: str, stages: int, microbatches: int, is_equal: bool) -> Any:
    """What such a pipeline makes."""
    schedule = schedule_of(name, stages, microbatches)
    shares = () if is_equal else UNEQUAL[stages]
    has_own_workers = all(len(schedule.stages_of(w)) == 1 for w in range(schedule.num_workers))
    sizes = SIZES[stages] if has_own_workers and not is_equal else ()
    return trained(single, pipelined(single.step, schedule, sizes, shares))


def of_search(single: Reference) -> Iterator[Run]:
    """Pipelines whose replicas share their work as the search finds it."""
    for name, stages in product(("1f1b", "zb-h1"), (2, 4)):
        mesh = (1, 8 // stages)
        options = {"stages": stages, "schedule": name, "microbatches": 4, "mesh": mesh}
        yield f"{name:16} {stages} stages, searched, mesh {mesh}", partial(run_step, single, options)


def of_one_program(single: Reference) -> Iterator[Run]:
    """Pipelines that are one program."""
    for name, workers, microbatches in product(("gpipe", "circular"), (2, 4), (4, 8)):
        stages = workers if name == "gpipe" else 2 * workers
        for mesh in MESHES[workers] if stages <= 4 else ():
            options = {"stages": stages, "schedule": name, "microbatches": microbatches, "mesh": mesh}
            yield (
                f"{name:16} {stages} stages, one program, mesh {mesh}, {microbatches} microbatches",
                partial(run_step, single, options | {"executor": "spmd"}),
            )


def run_step(single: Reference, options: dict[str, Any]) -> Any:
    """What a step makes that is parallelized so."""
    step = autoshard.parallelize(single.case.step, **options)
    return run_steps(step, single.case, jax.tree.map(jnp.copy, single.start), single.num_steps)


def judged(single: Reference, run: Callable[[], Any]) -> str:
    """Whether the numbers are one device's."""
    try:
        assert_equal(run(), single.results)
    except InputError as e:
        return f"refused: {e}"
    except AssertionError as e:
        return f"DIFFERS: {' '.join(str(e).split())[:200]}"
    return "alike"


def runs(model: str, single: Reference, turn: int) -> Iterator[Run]:
    """What there is to run of a model in a turn."""
    yield from of_programs(single, turn, list(MODELS).index(model))
    if turn == 0:
        yield from of_search(single)
        yield from of_one_program(single) if model == "gpt scan" else ()


def main() -> None:
    options = _options()
    single: dict[str, Reference] = {}
    for turn, model in product(options.turns, options.models or MODELS):
        if model not in single:
            single[model] = Reference.of(MODELS[model](batch=32, dtype=jnp.float64), NUM_STEPS)
        for said, run in runs(model, single[model], turn):
            start = time.perf_counter()
            result = judged(single[model], run)
            print(f"{model:9} {said:66} {time.perf_counter() - start:5.1f} s  {result}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--turns", nargs="+", type=int, choices=TURNS, default=TURNS, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    simulate_devices()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        with jax.enable_x64(True):
            main()
