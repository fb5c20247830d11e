"""Rings, moved heads, and both, as XLA's GPU compiler makes them: collectives and peak as predicted."""

import pytest

import autoshard
from tests.attentions import by_jax, by_softmax, layer_shapes, layer_step

CASES = {
    "ring": ({"heads": 4, "length": 32768}, "8xH100-80GB", "2GiB", "collective-permute"),
    "Ulysses": ({"heads": 16, "length": 16384, "channels": 64}, "8xH100-80GB", "70GiB", "all-to-all"),
    "USP": ({"heads": 8, "length": 32768}, "16xH100-80GB", "2GiB", "collective-permute"),
}
"""By name: sizes, a cluster, a cap, and the kind of collective that is expected. Scores do not fit in the smaller cap."""

SLOW = {"USP": "ring"}
"""By case, the cheaper one that shows its law."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_the_compiled_program_moves_and_holds_what_was_predicted(case):
    sizes, cluster, memory, kind = CASES[case]
    heads, channels = sizes["heads"], sizes.get("channels", 128)
    key_heads = sizes.get("key_heads", heads)
    form = by_jax(is_causal=True) if case == "USP" else by_softmax()
    step, args = (
        layer_step(form, heads, key_heads),
        layer_shapes(1, sizes["length"], heads, key_heads, channels),
    )
    plan = autoshard.search(step, *args, cluster=cluster, memory=memory, stages=1)
    assert kind in {one.kind for one in plan.estimates.collectives}
    proof = autoshard.verify(step, *args, plan=plan)
    assert proof.fits
    assert proof.differing == ()
