"""The first line of a printed plan, in the words of an expert.

    FSDP over 8 x tensor parallel over 8, 12 of 48 layers recomputed
    4 stages x 1F1B, 16 microbatches, data parallel over 8

Every plan has stages; a plan of one program has one. A stage has replicas and, for each axis of a replica's mesh, the
shares of the work that it splits (`search.plan.work_shares`). The words follow from these shares alone, in the terms of
the literature: ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023), tensor and sequence parallelism (Shoeybi et al.
2019, Korthikanti et al. 2022), spatial parallelism (Dryden et al. 2019), expert parallelism (Lepikhin et al. 2020). A
split without such a name is described.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType

from autoshard.cost_model.cluster import Cluster
from autoshard.search.plan.number_ranges import numbers_of, ranges
from autoshard.search.plan.resting_places import UPDATED, is_on_host
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import REPLICA, PlanValues
from autoshard.search.plan.work_shares import AxisUse, WorkShares

NAMED = 0.1
"""Smallest share of the FLOPs for which a kind of split is named: a smaller one is no part of a plan's name."""

MOST = 0.49
"""Share of parameters, optimizer state or sums that counts as most of them: a half, if shares are rounded."""

SCHEDULES = MappingProxyType(
    {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "eager-1f1b": "eager 1F1B",
        "interleaved-1f1b": "interleaved 1F1B",
        "circular": "circular",
        "zb-h1": "ZB-H1",
        "zb-h2": "ZB-H2",
        "zb-v": "ZB-V",
        "dualpipe-v": "DualPipe-V",
        "chimera": "Chimera",
    }
)
"""Schedules as their papers write them."""

HEAVY = re.compile(r"(?:^|[ /])(dot_general|conv_general_dilated|gather|scatter-add)(?: #\d+)?$")
"""Names of matrix products, convolutions, lookups and scatters in a plan's tables."""

ROW_READ = "update gather"
"""The name of an op that reads rows of a table or of its state to update them."""

_SOME_RECOMPUTED = re.compile(r"remat (\d[\d, -]*) of (\d+)")

_IN_SEGMENTS = re.compile(r"in segments of (\d+(?:, \d+)*)")


def headline(plan: PlanValues) -> str:
    """The kind of plan as an expert would call it, in one line."""
    pipeline, microbatches = _pipeline(plan), _microbatches(plan)
    sharing_of_all = [_sharing_of_stages(plan)]
    first = [*pipeline, *microbatches, *sharing_of_all] if pipeline else [*sharing_of_all, *microbatches]
    overlap = [f"overlap {plan.overlap:.0%}" if plan.overlap else "no overlap"] * (plan.overlap < 1)
    return ", ".join([*first, *_attention(plan), *_memory_savers(plan), *overlap])


def mfu(shares: Iterable[WorkShares | None], groups: Iterable[Cluster], step_s: float) -> float | None:
    """Model FLOPs utilization: the model's FLOPs, over the devices' peak FLOP/s times the step's seconds.

    FLOPs are those of `WorkShares.model_flops`: recomputed ones are left out. The peak is that of the operands' dtype; with
    several dtypes, the time at peak speed of each is added up.

    Args:
      shares: of any meshes of the plan; each counts the work of the whole step.
      groups: the cluster's groups of equal nodes.
      step_s: seconds per step.

    Returns:
      A share between 0 and 1; None if the FLOPs are not known.
    """
    known = next((one for one in shares if one is not None), None)
    if known is None or step_s <= 0:
        return None
    devices = [(group.num_devices, group.device) for group in groups]
    at_peak_s = (
        flops / sum(count * device.peak_flops_per_s(dtype) for count, device in devices)
        for dtype, flops in known.model_flops.items()
    )
    return sum(at_peak_s) / step_s


# --- parts of the line


def _pipeline(plan: PlanValues) -> list[str]:
    if not plan.schedule:
        return []
    return [f"{plural(len(plan.stages), 'stage')} x {SCHEDULES.get(plan.schedule, plan.schedule)}"]


def _microbatches(plan: PlanValues) -> list[str]:
    is_several = plan.microbatches > 1 or plan.schedule
    return [f"{plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}"] if is_several else []


def _attention(plan: PlanValues) -> list[str]:
    """Attention in blocks, and the number of devices among which keys and values travel."""
    if not plan.attention:
        return []
    sent = [one for one in plan.estimates.collectives if one.kind == "collective-permute"]
    largest = max(sent, key=lambda one: one.bytes, default=None)
    mesh = plan.shardings[0].mesh
    num_devices = prod(mesh[axis] for axis in largest.axes) if largest else 1
    return [f"ring attention over {num_devices}" if num_devices > 1 else "attention in blocks"]


def _sharing_of_stages(plan: PlanValues) -> str:
    texts: dict[str, list[int]] = {}
    shares = dict(enumerate(plan.estimates.shares))
    for n, stage in enumerate(plan.stages):
        words = sharing(stage.replicas, plan.sharding_of(stage).mesh, shares.get(stage.sharding))
        texts.setdefault(words, []).append(n)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"stage{'s' * (len(n) > 1)} {ranges(n, ', ')}: {words}" for words, n in texts.items())


def sharing(num_replicas: int, mesh: Mapping[str, int], shares: WorkShares | None) -> str:
    """How devices share a stage: `FSDP over 8 x tensor parallel over 8`.

    Args:
      num_replicas: groups of its devices, each with examples of its own.
      mesh: sizes of the axes of a replica's mesh, by name.
      shares: the work that these axes split; None if it is not known.
    """
    replicas = AxisUse(REPLICA, num_replicas, examples=1.0)
    if shares is None:
        axes = " x ".join(f"{name}={size}" for name, size in mesh.items() if size > 1)
        return f"split over {axes}" if axes else sharing(num_replicas, {}, WorkShares())
    sizes: dict[str, int] = {}
    uses = [use for use in (replicas, *shares.axes) if use.size > 1]
    for use in uses:
        words = axis_words(use)
        sizes[words] = sizes.get(words, 1) * use.size
    texts = [words.format(size) for words, size in sizes.items()]
    tables = [use for use in uses if use.tables >= MOST and use.examples >= NAMED]
    return " x ".join(texts) + "".join(f", tables split over {use.size}" for use in tables) or "one device"


def axis_words(use: AxisUse) -> str:
    """The words for an axis, with `{}` for its size: `FSDP over {}`."""
    shares = {
        _batch_words(use): use.examples,
        "sequence parallel": use.positions,
        "spatial parallel": use.rows,
        "tensor parallel": use.weights,
        "expert parallel": use.experts,
        "feature parallel": use.features,
    }
    named = [words for words, share in shares.items() if share >= NAMED]
    if not named:
        return "parameters split over {}" if use.parameters >= MOST else "replicated over {}"
    if max(use.positions, use.rows) >= NAMED > use.examples and _batch_words(use) != DATA_PARALLEL:
        named.insert(0, _batch_words(use))
    *others, last = named
    joined = " + ".join([*(one.removesuffix(" parallel") for one in others), last])
    with_sequence = use.weights >= NAMED and use.sums_scattered >= MOST
    rest = 1.0 - sum(shares.values())
    repeated = f" ({rest:.0%} of the FLOPs replicated)" if rest >= NAMED else ""
    return f"{joined} over {{}}{' with sequence parallelism' * with_sequence}{repeated}"


DATA_PARALLEL = "data parallel"


def _batch_words(use: AxisUse) -> str:
    """The kind of data parallelism, by the state that is split."""
    if use.gathered >= MOST and use.regathered >= MOST:
        return "FSDP"
    if use.gathered >= MOST or use.optimizer_state >= MOST:
        return "ZeRO-2" if use.reductions_scattered >= MOST else "ZeRO-1"
    return DATA_PARALLEL


def _memory_savers(plan: PlanValues) -> list[str]:
    """Recomputation, updates by rows, and arrays on the host."""
    texts = _recomputed(plan)
    if any(name.startswith(ROW_READ) for shares in plan.estimates.shares for name in shares.runs):
        texts.append("tables updated by rows")
    if any("offload" in text for text in plan.retention.values()):
        texts.append("residuals offloaded")
    specs = plan.shardings[0].arguments.values()
    if any(map(is_on_host, specs)):
        is_updated = any(spec.endswith(UPDATED) for spec in specs)
        texts.append("state on the host" + UPDATED * is_updated)
    return texts


def _recomputed(plan: PlanValues) -> list[str]:
    again = {name: text for name, text in plan.retention.items() if "remat" in text}
    if not again:
        return []
    layers = Counter(
        (len(numbers_of(found[1])), int(found[2]))
        for name, text in again.items()
        if HEAVY.search(name) and (found := _SOME_RECOMPUTED.search(text))
    )
    if layers:
        (count, total), _ = layers.most_common(1)[0]
        return [f"{count} of {total} layers recomputed"]
    if cut := [found[1] for text in again.values() if (found := _IN_SEGMENTS.search(text))]:
        return [
            f"a loop recomputed in segments of {cut[0]}" if len(cut) == 1 else "loops recomputed in segments"
        ]
    share = max((shares.recomputed for shares in plan.estimates.shares), default=0.0)
    return [f"{share:.0%} of the forward FLOPs recomputed" if share >= 0.005 else "cheap ops recomputed"]
