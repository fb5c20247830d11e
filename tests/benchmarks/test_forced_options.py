"""What the benchmark of forced options counts."""

import math

from benchmarks.forced_options import Row, digest

CASES = [
    Row("unet 16xL4 60%", {"": 1.0, "mesh=16": 1.2, "microbatches=4": 0.98, "stages=2": None}, 1.0),
    Row("lstm 16xL4 60%", {"": None, "mesh=16": 2.0, "microbatches=4": None}, 1.0),
    Row("vit 16xL4 60%", {"": 1.0, "mesh=16": 1.0}, 1.0),
]


def test_a_forced_search_without_a_plan_loses_and_one_with_the_only_plan_wins():
    assert dict(CASES[0].ratios()) == {"mesh=16": 1.2, "microbatches=4": 0.98, "stages=2": math.inf}
    assert dict(CASES[1].ratios()) == {"mesh=16": 0.0}


def test_the_digest_counts_cases_by_their_best_forced_option():
    lines = [*digest(CASES)]
    assert lines[:4] == [
        "3 cases, 5 forced searches",
        "cases in which a forced option is faster by more than 1%: 2",
        "cases in which a forced option is faster by more than 3%: 1",
        "cases in which only a forced search has a plan: 1",
    ]
    assert lines[4:] == ["| unet 16xL4 60% | microbatches=4 0.980 |", "| lstm 16xL4 60% | mesh=16 0.000 |"]
