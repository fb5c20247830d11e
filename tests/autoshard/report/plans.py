"""Plans for reports: of one program, with a profile; of a pipeline; with names that are no markup."""

from dataclasses import replace

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.plan import Collective, Estimates, Plan, Sharding, Stage, StageEstimates
from autoshard.search.plan.profile import OpTime, Profile
from autoshard.search.plan.work_shares import AxisUse, WorkShares

NUM_SLICES = 120

COLLECTIVES = (
    Collective("all-gather", ("data",), 24, 384 << 20, 1e-3),
    Collective("all-reduce", ("data", "model"), 63, 9 << 20, 2e-3),
)

LAYERS = {
    f"state.params['block_{n}']['{name}']": ("P('data', 'model')", "float32[1024,4096] parameter")
    for n in range(12)
    for name in ("fc1", "fc2")
}

ARGUMENTS = {
    **LAYERS,
    "state.step": ("P()", "int32[] state"),
    "batch['tokens']": ("P(('data', 'model'))", "int32[64,1024] batch"),
}

OPS = (
    OpTime("forward block_*/fc1/dot_general", 12, 4e-3, 1.2e12, 4e8, 989e12),
    OpTime("forward embed/gather", 1, 1e-4, 0.0, 3e7, 494.5e12),
)


def profile(ops=OPS) -> Profile:
    """Forward, then backward; what is held rises and falls."""
    half = NUM_SLICES // 2
    rising = tuple((min(n, NUM_SLICES - n) + 1) << 26 for n in range(NUM_SLICES))
    return Profile(
        0.02,
        {
            "forward": (1.0,) * half + (0.0,) * half,
            "backward": (0.0,) * half + (1.0,) * half,
            "collectives over data": (0.25,) * NUM_SLICES,
        },
        {"parameters": (3 << 30,) * NUM_SLICES, "residuals": rising, "temporaries": (1 << 28,) * NUM_SLICES},
        ops,
    )


def one_program(arguments=ARGUMENTS, step="train_step", options=(), **estimated) -> Plan:
    """A plan on a mesh of 2 x 4.

    Args:
      arguments: by path: spec, and type with role.
      step: the step's name.
      options: of the search.
      **estimated: estimates that differ.
    """
    estimates = Estimates(
        step_s=0.021,
        peak_bytes=8 << 30,
        compute_s=0.020,
        hidden_s=0.002,
        residents={"parameters": 3 << 30, "residuals": 4 << 30, "temporaries": 1 << 30},
        peak_at="backward add_any (losses/classification.py:400)",
        collectives=COLLECTIVES,
        shares=(
            WorkShares(
                (AxisUse("data", 2, examples=1.0), AxisUse("model", 4, weights=1.0)), {"bfloat16": 1e14}
            ),
        ),
        profile=profile(),
    )
    specs = {name: spec for name, (spec, _) in arguments.items()}
    return _marked(
        Plan(
            step=step,
            fingerprint="0123456789abcdef",
            jax="0.12.0",
            cluster=parse_cluster("8xH100-80GB").to_json(),
            options=dict(options),
            meshes=((8,), (2, 4)),
            memory_bytes=10 << 30,
            executor="jit",
            microbatches=1,
            retention={},
            shardings=(Sharding({"data": 2, "model": 4}, specs, {"forward dot": "P() -> P()"}, {}),),
            estimates=replace(estimates, **estimated),
            gap=0.005,
            outline=Outline({name: said for name, (_, said) in arguments.items()}, {}, {}),
        )
    )


def pipeline(microbatches=8, stages=4) -> Plan:
    """A plan of so many stages on as many workers, under 1F1B."""
    taken = StageEstimates(
        forward_s=1e-3,
        backward_s=2e-3,
        update_s=1e-3,
        residual_bytes=1 << 20,
        state_bytes=1 << 30,
        peak_bytes=2 << 30,
    )
    step_s = (microbatches + stages - 1) * 3e-3
    return _marked(
        replace(
            one_program(),
            cluster=parse_cluster(f"{max(8, stages)}xH100-80GB").to_json(),
            executor="mpmd",
            schedule="1f1b",
            workers=stages,
            microbatches=microbatches,
            stages=tuple(Stage(n, max(1, 8 // stages)) for n in range(stages)),
            shardings=(Sharding({"data": 1}, {"w": "P('data')"}, {}, {}),),
            estimates=Estimates(step_s=step_s, peak_bytes=2 << 30, bubble=0.25, stages=(taken,) * stages),
            gap=None,
        )
    )


def _marked(plan: Plan) -> Plan:
    return replace(plan, marks=marks_of(plan))
