"""Small random inter-op problems, and all their plans."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np

from autoshard.search.pipeline.inter_op import fastest_cut, nearest_cut
from autoshard.search.pipeline.stage_costs import ClusterNode, StageOption, Submesh
from autoshard.search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut

Chosen = list[tuple[StageOption, int, int, int]]
"""Per stage: option, first layer, end, first device."""


def submeshes(nodes: tuple[ClusterNode, ...], kind: str = "") -> tuple[Submesh, ...]:
    """The shapes on nodes of a kind: 1, 2, 4, ... devices of a node, and whole nodes."""
    alike = [node for node in nodes if node.kind == kind]
    num_devices = alike[0].num_devices
    powers = (2**i for i in range(num_devices.bit_length()))
    parts = tuple(Submesh(1, size) for size in powers if size < num_devices)
    return parts + tuple(Submesh(n, num_devices) for n in range(1, len(alike) + 1))


def plan_stages(problem: InterOpProblem, relative_gap: float = 0.0) -> InterOpPlan | NoCut:
    """The fastest cut that fits, or why there is none."""
    return fastest_cut(problem, relative_gap) or nearest_cut(problem)


def drawn(seed: int) -> InterOpProblem:
    """Up to 6 layers on up to 3 nodes of up to 4 devices, of one or two kinds; memory from scarce to plenty."""
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 7))
    kinds = ["a"] if rng.random() < 0.7 else ["a", "b"]
    sizes = {kind: int(rng.choice([1, 2, 3, 4])) for kind in kinds}
    picked = sorted(rng.choice(kinds, size=int(rng.integers(1, 4))))
    nodes = tuple(ClusterNode(sizes[kind], {"a": 10.0, "b": 14.0}[kind], kind) for kind in picked)
    nodes = nodes if sum(node.num_devices for node in nodes) <= 8 else nodes[:2]
    scarcity = rng.uniform(0.5, 6)
    options = []
    for kind in sorted({node.kind for node in nodes}):
        layer_s = rng.uniform(0.5, 2, num_layers)
        for submesh in submeshes(nodes, kind):
            for variant, slower, less in (("keep", 1.0, 1.0), ("remat", rng.uniform(1.2, 1.5), 0.2)):
                if submesh.num_nodes > 1 and rng.random() < 0.3:
                    continue
                size = submesh.size
                options.append(
                    StageOption(
                        submesh,
                        variant,
                        layer_s * slower / size ** rng.uniform(0.6, 1) * rng.uniform(0.9, 1.1, num_layers),
                        rng.uniform(0.2, 1, num_layers) * scarcity * less / size,
                        rng.uniform(0.5, 2, num_layers) * scarcity / size,
                        rng.uniform(0, 1, num_layers),
                        rng.uniform(0, 0.5, num_layers) * (rng.random() < 0.5),
                        kind,
                    )
                )
    num_microbatches = int(rng.integers(1, 9))
    one_f_one_b = tuple(min(behind + 1, num_microbatches) for behind in range(num_layers))
    problem = InterOpProblem(
        nodes,
        tuple(options),
        num_microbatches,
        one_f_one_b if rng.random() < 0.7 else (num_microbatches,),
        rng.uniform(0, 0.3, (2, num_layers + 1)) * (rng.random() < 0.7),
        int(rng.integers(1, 4)) if rng.random() < 0.2 else None,
    )
    return linked(problem, rng) if rng.random() < 0.3 else problem


def linked(problem: InterOpProblem, rng: np.random.Generator) -> InterOpProblem:
    """The same with three kinds of link, anywhere."""
    transfer_s = rng.uniform(0, 0.3, (3, problem.num_layers + 1))
    links = tuple(rng.integers(0, 3, problem.num_devices).tolist())
    return replace(problem, transfer_s=transfer_s, links=links)


def every_cut(problem: InterOpProblem, layer: int = 0, device: int = 0) -> Iterator[Chosen]:
    """All stages from a layer and a device that use all devices in order, each inside a node or on whole ones of a kind."""
    if layer == problem.num_layers and device == problem.num_devices:
        yield []
    if layer == problem.num_layers or device == problem.num_devices:
        return
    for option in problem.options:
        if stands(problem, option, device):
            for end in range(layer + 1, problem.num_layers + 1):
                for rest in every_cut(problem, end, device + option.submesh.size):
                    yield [(option, layer, end, device), *rest]


def node_starts(problem: InterOpProblem) -> list[int]:
    """The first device of each node, and the end."""
    return [0, *accumulate(node.num_devices for node in problem.nodes)]


def stands(problem: InterOpProblem, option: StageOption, first: int) -> bool:
    """Whether an option may begin at a device."""
    starts, end = node_starts(problem), first + option.submesh.size
    if end > starts[-1]:
        return False
    touched = [i for i in range(len(problem.nodes)) if starts[i] < end and first < starts[i + 1]]
    if any(problem.nodes[i].kind != option.kind for i in touched):
        return False
    if option.submesh.num_nodes == 1:
        return len(touched) == 1
    return len(touched) == option.submesh.num_nodes and first in starts and end in starts


def overflow_bytes(problem: InterOpProblem, chosen: Chosen) -> float:
    """By how much the fullest stage exceeds its cap; not above zero where all fit."""
    caps = {node.kind: node.memory_bytes for node in problem.nodes}
    over = []
    for at, (option, first, end, _) in enumerate(chosen):
        held = problem.held_with(len(chosen) - 1 - at)
        inside = slice(first, end)
        state = option.state_bytes[inside].sum() + held * option.residual_bytes[inside].sum()
        over.append(state + option.workspace_bytes[inside].max() - caps[option.kind])
    return float(max(over))


def step_s(problem: InterOpProblem, chosen: Chosen) -> float:
    """What a step takes."""
    starts = node_starts(problem)
    times_s = [option.time_s[first:end].sum() for option, first, end, _ in chosen]
    updates_s = [option.update_s[first:end].sum() for option, first, end, _ in chosen]
    links = problem.links or [int(device in starts) for device in range(problem.num_devices)]
    transfers_s = [problem.transfer_s[links[device], first] for _, first, _, device in chosen[1:]]
    slowest_s = max((problem.num_microbatches - 1) * t + u for t, u in zip(times_s, updates_s, strict=True))
    return float(sum(times_s) + sum(transfers_s) + slowest_s)


def fastest_s(problem: InterOpProblem) -> float:
    """Of all plans that fit."""
    return min(
        (step_s(problem, cut) for cut in wanted(problem) if overflow_bytes(problem, cut) <= 1e-9),
        default=np.inf,
    )


def wanted(problem: InterOpProblem) -> Iterator[Chosen]:
    """All cuts into as many stages as are asked for."""
    return (cut for cut in every_cut(problem) if problem.num_stages in (None, len(cut)))
