"""Times the ILP and its possible backends on problems shaped like real searches.

The problems are a Transformer step's: blocks, forward and backward, folded over the layers, between an
embedding and a vocabulary head, with storage, gradients and optimizer updates. Nodes are ops (labels: which
factor each mesh axis splits), values with several readers and residuals (labels: spec, and what happens to it
until the backward phase), and parameters' storage. Costs are a small copy of the real ones: FLOPs, HBM and
reshard bytes over link speeds. A "long" problem's step is mostly computation, a "short" one's (a sixteenth of
the tokens) mostly communication. The memory limit is a fraction of what the fastest assignment takes.

    .venv/bin/python benchmarks/solvers.py                # our pipeline on every problem
    .venv/bin/python benchmarks/solvers.py 8x8 backends   # one mesh, plain integer programs too (minutes)
"""

import sys
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter

import numpy as np

from autoshard.search.solver.branch_and_bound import (
    Edge,
    Labels,
    MemoryConstraint,
    NoFitError,
    Problem,
    solve,
)
from autoshard.search.solver.clock import PROCESSOR, Deadline
from autoshard.search.solver.milp import solve_milp
from autoshard.search.solver.pbqp import merged

FLOPS_PER_S = 400e12
HBM_BYTES_PER_S = 3e12
HOST_BYTES_PER_S = 25e9
LATENCY_S = 15e-6
PARTIAL = "+"
UNSPLITTABLE = "td"
Spec = tuple[str | None, ...]
"""Per mesh axis: the dim that it splits, PARTIAL, or None."""


@dataclass(frozen=True, slots=True)
class Mesh:
    sizes: tuple[int, ...]
    link_bytes_per_s: tuple[float, ...]

    def shards(self, spec: Spec) -> int:
        return int(
            np.prod([n for n, dim in zip(self.sizes, spec, strict=True) if dim not in (None, PARTIAL)])
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value: its dims, its bytes, the node that stands for it and the spec that each label gives it."""

    dims: str
    num_bytes: float
    node: int
    specs: tuple[Spec, ...]


@dataclass(slots=True)
class Builder:
    """Collects nodes, edges and, in program order, what is live."""

    mesh: Mesh
    sizes: dict[str, int]
    repeat: int = 1
    costs: list[np.ndarray] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    points: list[tuple[str, dict[int, np.ndarray]]] = field(default_factory=list)
    live: dict[int, np.ndarray] = field(default_factory=dict)

    def num_elements(self, dims: str) -> float:
        return float(np.prod([self.sizes[d] for d in dims]))

    def specs(self, dims: str) -> tuple[Spec, ...]:
        """Every spec whose dims divide evenly and keep at least one element a shard."""
        options = product((*(d for d in dims if d not in UNSPLITTABLE), None), repeat=len(self.mesh.sizes))
        return tuple(spec for spec in options if self._fits(spec))

    def _fits(self, spec: Spec) -> bool:
        dims = sorted({dim for dim in spec if dim})
        split = (
            int(np.prod([n for n, d in zip(self.mesh.sizes, spec, strict=True) if d == dim])) for dim in dims
        )
        return all(self.sizes[dim] % num == 0 for dim, num in zip(dims, split, strict=True))

    def node(self, cost: np.ndarray) -> int:
        self.costs.append(cost * self.repeat)
        return len(self.costs) - 1

    def reshard_s(self, num_bytes: float, source: Spec, target: Spec) -> float:
        """One collective an axis, on what the other axes leave of the value; nothing becomes partial."""
        total = 0.0
        shards = self.mesh.shards(tuple(s if s == t else None for s, t in zip(source, target, strict=True)))
        for s, t, n, speed in zip(source, target, self.mesh.sizes, self.mesh.link_bytes_per_s, strict=True):
            if t == PARTIAL and s != PARTIAL:
                return np.inf
            moved = num_bytes / shards * (n - 1) / n / speed
            if s == t or s is None:
                continue
            weight = {(True, True): 2.0, (True, False): 1.0, (False, True): 1.0, (False, False): 1.0 / n}
            total += LATENCY_S + moved * weight[s == PARTIAL, t is None]
        return total

    def join(self, value: Tensor, node: int, wanted: tuple[Spec, ...]) -> None:
        """The reshards from each spec of a value to each spec that a node wants it in."""
        cache = {
            pair: self.reshard_s(value.num_bytes, *pair)
            for pair in product(sorted(set(value.specs), key=str), wanted)
        }
        cost = np.array([[cache[source, target] for target in wanted] for source in value.specs])
        self.edges.append(Edge(value.node, node, cost * self.repeat))

    def op(self, name: str, operands: list[Tensor], factors: str, out: str, flops: float = 1.0) -> Tensor:
        """An op over `factors`, of which those not in `out` are contracted."""
        labels = self.specs(factors)
        points, size = self.num_elements(factors), 2.0 * self.num_elements(out)
        moved = size + sum(t.num_bytes for t in operands)
        cost = [
            max(points * flops / FLOPS_PER_S, moved / HBM_BYTES_PER_S) / self.mesh.shards(s) for s in labels
        ]
        node = self.node(np.array(cost))
        for operand in operands:
            self.join(operand, node, tuple(restricted(spec, operand.dims) for spec in labels))
        specs = tuple(tuple(d if d is None or d in out else PARTIAL for d in spec) for spec in labels)
        working = np.array([size / self.mesh.shards(spec) for spec in specs])
        self.points.append((name, {**self.live, node: working}))
        return Tensor(out, size, node, specs)

    def value(self, made: Tensor, *, is_residual: bool = False, layers: int = 1) -> Tensor:
        """A node for a value with several readers; a residual's labels choose keep, remat or offload too."""
        specs, copy_sources = self.specs(made.dims), 3 if is_residual else 1
        shards = np.array([self.mesh.shards(spec) for spec in specs], float)
        remat_s = 20 * made.num_bytes / HBM_BYTES_PER_S / shards
        offload_s = made.num_bytes / HOST_BYTES_PER_S / shards * 0.3
        cost = np.concatenate([0 * shards, remat_s, offload_s][:copy_sources])
        kept = np.concatenate([made.num_bytes * layers / shards, 0 * shards, 0 * shards][:copy_sources])
        node = self.node(cost)
        value = Tensor(made.dims, made.num_bytes, node, specs * copy_sources)
        self.join(made, node, value.specs)
        self.live[node] = kept
        return value

    def parameter(self, dims: str, layers: int) -> tuple[Tensor, Tensor]:
        """Its storage, and the optimizer state's (12 bytes a parameter in all)."""
        specs, num = self.specs(dims), self.num_elements(dims)
        shards = np.array([self.mesh.shards(spec) for spec in specs], float)
        stored, state = self.node(0 * shards), self.node(24.0 * num / HBM_BYTES_PER_S / shards)
        self.live[stored] = 4.0 * num * layers / shards
        self.live[state] = 8.0 * num * layers / shards
        return Tensor(dims, 2.0 * num, stored, specs), Tensor(dims, 4.0 * num, state, specs)

    def free(self, *values: Tensor) -> None:
        for value in values:
            self.live.pop(value.node, None)

    def problem(self) -> tuple[Problem, tuple[MemoryConstraint, ...]]:
        rows = (MemoryConstraint(name, tuple(sorted(live.items())), 0.0) for name, live in self.points)
        return Problem(tuple(self.costs), tuple(self.edges)), tuple(rows)


def restricted(spec: Spec, dims: str) -> Spec:
    return tuple(dim if dim is not None and dim in dims else None for dim in spec)


def linear(b: Builder, name: str, x: Tensor, weight: Tensor, out: str) -> Tensor:
    factors = out + "".join(d for d in weight.dims if d not in out)
    return b.op(name, [x, weight], factors, out, 2.0)


def linear_backward(b: Builder, name: str, x: Tensor, pair: tuple[Tensor, Tensor], grad: Tensor) -> Tensor:
    """Both gradients of a product, and the parameter's update."""
    weight, state = pair
    factors = grad.dims + "".join(d for d in x.dims if d not in grad.dims)
    dw = b.op(f"{name}.dw", [x, grad], factors, weight.dims, 2.0)
    update(b, name, weight, state, dw)
    return b.op(f"{name}.dx", [grad, weight], factors, x.dims, 2.0)


def update(b: Builder, name: str, weight: Tensor, state: Tensor, gradient: Tensor) -> None:
    cast = b.op(f"{name}.cast", [gradient], weight.dims, weight.dims)
    moment = b.op(f"{name}.moment", [cast, state], weight.dims, weight.dims)
    b.join(moment, state.node, state.specs)
    new = b.op(f"{name}.new", [moment, weight], weight.dims, weight.dims)
    b.join(new, weight.node, weight.specs)


def transformer(
    mesh: Mesh, layers: int, sizes: dict[str, int], num_blocks: int = 1
) -> tuple[Problem, tuple[MemoryConstraint, ...]]:
    """A training step: `num_blocks` kinds of block, each repeated `layers / num_blocks` times.

    Dims: b batch, s sequence, t the keys' sequence, e embedding, h heads, d head size, f hidden,
    v vocabulary.
    """
    b = Builder(mesh, sizes)
    each = layers // num_blocks
    head = b.parameter("ve", 1)
    kinds = [
        [b.parameter(dims, each) for dims in ("ehd", "ehd", "ehd", "hde", "ef", "fe", "e", "e")]
        for _ in range(num_blocks)
    ]
    tokens = b.op("embed", [head[0]], "bsve", "bse", 0.01)
    stream = b.value(tokens)
    saved = []
    for kind in kinds:
        b.repeat = each
        block, stream = forward(b, kind, stream, each)
        saved.append(block)
    b.repeat = 1
    logits = linear(b, "head", stream, head[0], "bsv")
    logits = b.value(logits)
    loss = b.op("loss", [logits], "bsv", "bs")
    grad = b.op("loss.dx", [logits, loss], "bsv", "bsv")
    grad_stream = b.value(linear_backward(b, "head", stream, head, b.value(grad)))
    b.free(logits)
    for kind, block in zip(reversed(kinds), reversed(saved), strict=True):
        b.repeat = each
        grad_stream = backward(b, kind, block, grad_stream)
    return b.problem()


def forward(b: Builder, kind, x: Tensor, layers: int):
    wq, wk, wv, wo, up, down, scale1, scale2 = kind
    normed = b.value(b.op("ln1", [x, scale1[0]], "bse", "bse"), is_residual=True, layers=layers)
    q = b.value(linear(b, "q", normed, wq[0], "bshd"), is_residual=True, layers=layers)
    k = b.value(b.op("k", [normed, wk[0]], "bthde", "bthd", 2.0), is_residual=True, layers=layers)
    v = b.value(b.op("v", [normed, wv[0]], "bthde", "bthd", 2.0), is_residual=True, layers=layers)
    scores = b.op("qk", [q, k], "bhstd", "bhst", 2.0)
    weights = b.value(b.op("softmax", [scores], "bhst", "bhst", 5.0), is_residual=True, layers=layers)
    mixed = b.value(b.op("av", [weights, v], "bhstd", "bshd", 2.0), is_residual=True, layers=layers)
    attended = linear(b, "o", mixed, wo[0], "bse")
    middle = b.value(b.op("add1", [x, attended], "bse", "bse"), is_residual=True, layers=layers)
    normed2 = b.value(b.op("ln2", [middle, scale2[0]], "bse", "bse"), is_residual=True, layers=layers)
    hidden = b.value(linear(b, "up", normed2, up[0], "bsf"), is_residual=True, layers=layers)
    active = b.value(b.op("gelu", [hidden], "bsf", "bsf", 8.0), is_residual=True, layers=layers)
    out = b.value(
        b.op("add2", [middle, linear(b, "down", active, down[0], "bse")], "bse", "bse"),
        is_residual=True,
        layers=layers,
    )
    b.join(out, x.node, x.specs)
    return (x, normed, q, k, v, weights, mixed, middle, normed2, hidden, active), out


def backward(b: Builder, kind, block, grad: Tensor) -> Tensor:
    wq, wk, wv, wo, up, down, scale1, scale2 = kind
    x, normed, q, k, v, weights, mixed, middle, normed2, hidden, active = block
    d_active = linear_backward(b, "down", active, down, grad)
    d_hidden = b.value(b.op("gelu.dx", [d_active, hidden], "bsf", "bsf", 8.0))
    d_normed2 = b.value(linear_backward(b, "up", normed2, up, d_hidden))
    b.free(active, hidden, d_hidden)
    update(b, "scale2", *scale2, b.op("scale2.dw", [d_normed2, middle], "bse", "e"))
    d_middle = b.value(
        b.op("add1.dx", [grad, b.op("ln2.dx", [d_normed2, middle], "bse", "bse")], "bse", "bse")
    )
    d_mixed = b.value(linear_backward(b, "o", mixed, wo, d_middle))
    b.free(mixed, d_normed2)
    d_weights = b.op("av.dw", [d_mixed, v], "bhstd", "bhst", 2.0)
    d_scores = b.value(b.op("softmax.dx", [d_weights, weights], "bhst", "bhst", 5.0))
    b.free(weights)
    d_q = b.value(b.op("qk.dq", [d_scores, k], "bhstd", "bshd", 2.0))
    d_k = b.value(b.op("qk.dk", [d_scores, q], "bhstd", "bthd", 2.0))
    d_v = b.value(b.op("av.dv", [d_mixed, weights], "bhstd", "bthd", 2.0))
    b.free(d_scores)
    parts = [
        linear_backward(b, name, normed, w, d)
        for name, w, d in (("q", wq, d_q), ("k", wk, d_k), ("v", wv, d_v))
    ]
    d_normed = b.value(b.op("sum", parts, "bse", "bse"))
    update(b, "scale1", *scale1, b.op("scale1.dw", [d_normed, x], "bse", "e"))
    out = b.value(b.op("add0.dx", [d_middle, b.op("ln1.dx", [d_normed, x], "bse", "bse")], "bse", "bse"))
    b.join(out, grad.node, grad.specs)
    b.free(normed, q, k, v, d_q, d_k, d_v, d_normed, d_middle, middle, normed2)
    return out


SIZES = {"b": 64, "s": 2048, "t": 2048, "e": 4096, "h": 32, "d": 128, "f": 16384, "v": 51200}
MESHES = {
    "64": Mesh((64,), (25e9,)),
    "8x8": Mesh((8, 8), (25e9, 300e9)),
    "4x16": Mesh((4, 16), (25e9, 60e9)),
    "2x4": Mesh((2, 4), (300e9, 300e9)),
    "8x2x4": Mesh((8, 2, 4), (25e9, 300e9, 300e9)),
}


SHORT = {**SIZES, "s": 128, "t": 128}
NUM_LAYERS = 32
FRACTIONS = (None, 0.8, 0.5, 0.3)
BACKENDS = ("HIGHS", "GSCIP", "CP_SAT")
TIME_LIMIT_S = 20.0


def overflowing(
    rows: tuple[MemoryConstraint, ...], limit_bytes: float, labels: Labels
) -> tuple[MemoryConstraint, ...]:
    """The lazy oracle."""
    return tuple(row for row in rows if row.total_bytes(labels) > limit_bytes)


def problems(mesh_names: list[str]):
    """(name, problem, rows, limit) of every mesh, length and memory fraction."""
    for mesh_name in mesh_names:
        for length, sizes, num_blocks in (("long", SIZES, 1), ("short", SHORT, 1), ("short x2", SHORT, 2)):
            problem, rows = transformer(MESHES[mesh_name], NUM_LAYERS, sizes, num_blocks)
            free = solve(problem, time_limit_s=TIME_LIMIT_S)
            peak_bytes = max(row.total_bytes(free.labels) for row in rows)
            for fraction in FRACTIONS:
                limit_bytes = peak_bytes * (fraction or 2.0)
                yield f"{mesh_name} {length} {fraction or 'free'}", problem, rows, limit_bytes


def ours(problem: Problem, rows: tuple[MemoryConstraint, ...], limit_bytes: float) -> str:
    start_s = perf_counter()

    def violated(labels: Labels) -> tuple[MemoryConstraint, ...]:
        return overflowing(rows, limit_bytes, labels)

    try:
        found = solve(problem, limit_bytes=limit_bytes, violated=violated, time_limit_s=TIME_LIMIT_S)
    except NoFitError as error:
        return f"{perf_counter() - start_s:6.2f} s  infeasible{'' if error.is_proven else '?'}"
    return f"{perf_counter() - start_s:6.2f} s  {found.cost_s:.6g} gap {found.gap:.0e}  {found.stats}"


def plain(problem: Problem, rows: tuple[MemoryConstraint, ...], limit_bytes: float, backend: str) -> str:
    """One integer program with every row."""
    start_s = perf_counter()
    deadline = Deadline.after(TIME_LIMIT_S, PROCESSOR)
    answer = solve_milp(
        merged(problem), rows, limit_bytes, deadline=deadline, relative_gap=1e-4, backend=backend
    )
    taken_s = perf_counter() - start_s
    if answer.labels is None:
        return f"{taken_s:6.2f} s  none, bound {answer.bound:.6g}"
    cost_s = problem.cost_s(answer.labels)
    return f"{taken_s:6.2f} s  {cost_s:.6g} gap {(cost_s - answer.bound) / cost_s:.0e}"


def main(mesh_names: list[str], with_backends: bool) -> None:
    for name, problem, rows, limit_bytes in problems(mesh_names):
        edges, labels = len(merged(problem).edges), sum(problem.num_labels)
        print(f"{name}: {len(problem.node_cost_s)} nodes, {labels} labels, {edges} edges, {len(rows)} rows")
        print(f"  ours    {ours(problem, rows, limit_bytes)}", flush=True)
        for backend in BACKENDS if with_backends else ():
            print(f"  {backend:<7} {plain(problem, rows, limit_bytes, backend)}", flush=True)


if __name__ == "__main__":
    codec = sys.argv[1:]
    main([word for word in codec if word in MESHES] or list(MESHES), "backends" in codec)
