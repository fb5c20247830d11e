"""Products, elementwise functions and reductions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dice import Dice
from .layer import Layer, Shape, Weight, distinct, elementwise

LETTERS = "abcd"


# --- products


def dense(dice: Dice, shape: Shape) -> Layer:
    """`dot_general` with a weight: any dimension contracted, any layout, at times one weight per entry of another."""
    summed, others = _one_and_the_others(dice, len(shape))
    batch = (dice.pick(others),) if others and dice.flip(0.3) else ()
    size = shape[summed] if dice.flip() else dice.size()
    is_transposed, is_right, is_restored = dice.flip(), dice.flip(), dice.flip()
    matrix = (size, shape[summed]) if is_transposed else (shape[summed], size)
    of_x, of_w = ((summed,), batch), ((len(batch) + is_transposed,), tuple(range(len(batch))))

    def apply(weights, key, x):
        (contract_x, batch_x), (contract_w, batch_w) = of_x, of_w
        if is_right:
            return lax.dot_general(x, weights, ((contract_x, contract_w), (batch_x, batch_w)))
        y = lax.dot_general(weights, x, ((contract_w, contract_x), (batch_w, batch_x)))
        return jnp.moveaxis(y, len(batch), summed) if is_restored else y

    return Layer("dense", apply, Weight((*(shape[b] for b in batch), *matrix)))


def einsum(dice: Dice, shape: Shape) -> Layer:
    """A weight that shares some dimensions; of those some are contracted, the others batches."""
    of_x = LETTERS[: len(shape)]
    shared = [of_x[d] for d in dice.some(len(shape))]
    summed = set(shared[: dice.between(0, len(shared))])
    sizes = dict(zip(of_x, shape, strict=True)) | {"z": dice.size()}
    of_w = _shuffled(dice, [*shared, "z"])
    made = _shuffled(dice, [c for c in [*of_x, "z"] if c not in summed])
    formula = f"{of_x},{of_w}->{made}"
    return Layer(
        f"einsum {formula}",
        lambda weights, key, x: jnp.einsum(formula, x, weights),
        Weight(tuple(sizes[c] for c in of_w)),
    )


def gram(dice: Dice, shape: Shape) -> Layer | None:
    """Scores of all pairs along one dimension, in batches over the others."""
    if len(shape) < 2:
        return None
    row, summed = dice.order(len(shape))[:2]
    letters = LETTERS[: len(shape)]
    right = letters.replace(letters[row], "z")
    made = letters.replace(letters[summed], "z")
    formula = f"{letters},{right}->{made}"
    scale = shape[summed] ** -0.5
    return elementwise(f"gram {formula}", lambda x: jnp.einsum(formula, x, jnp.tanh(x)) * scale)


def attention(dice: Dice, shape: Shape) -> Layer | None:
    """Over the second-last dimension; at times causal, at times with several heads."""
    if len(shape) < 2:
        return None
    heads, head_dim, is_causal = dice.pick((1, 2, 8)), dice.pick((3, 4)), dice.flip()

    def apply(weights, key, x):
        q, k, v = (jnp.einsum("...tf,fhd->...thd", x, weights[name]) for name in "qkv")
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / head_dim**0.5
        if is_causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        return x + jnp.einsum("...thd,hdf->...tf", mixed, weights["out"])

    features = shape[-1]
    inner = {name: Weight((features, heads, head_dim)) for name in "qkv"}
    return Layer("attention", apply, inner | {"out": Weight((heads, head_dim, features))})


# --- elementwise

FUNCTIONS = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "erf": jax.scipy.special.erf,
    "softplus": jax.nn.softplus,
    "leaky relu": lambda x: jnp.where(x > 0, x, 0.1 * x),
    "at least": lambda x: jnp.maximum(x, -0.3),
    "clip": lambda x: jnp.clip(x, -1.5, 1.5) + 0.1 * x,
    "literal first": lambda x: 1.0 - 0.5 * x,
    "literal last": lambda x: x * 0.7 + 0.3,
    "power": lambda x: jnp.tanh(x) ** 3 + 0.5 * x,
    "root": lambda x: jnp.sqrt(x**2 + 1.0),
    "quotient": lambda x: x / (1.0 + jnp.abs(x)),
    "logarithm": lambda x: jnp.log1p(x**2) + 0.1 * x,
    "exponential": lambda x: jnp.exp(-(x**2)) + 0.1 * x,
    "angle": lambda x: jnp.arctan2(x, 2.0),
    "steps": lambda x: x + lax.stop_gradient(jnp.round(2.0 * x) - x),
    "signs": lambda x: 0.5 * x + jnp.sign(x) * 0.1,
    "through float32": lambda x: x + 1e-3 * x.astype(jnp.int32).astype(x.dtype),
    "not finite": lambda x: jnp.where(jnp.isfinite(x) & ~(x > 1e6), x, 0.0),
    "select": lambda x: lax.select_n(jnp.abs(x) > 0.5, 0.9 * x, jnp.sin(x)),
}


def function(dice: Dice, shape: Shape) -> Layer:
    """With literals as operands, or none."""
    name = dice.pick(list(FUNCTIONS))
    return elementwise(name, FUNCTIONS[name])


def with_constant(dice: Dice, shape: Shape) -> Layer:
    """With an array of the program's as operand, whole or broadcast."""
    kept = dice.some(len(shape))
    array = dice.numbers(tuple(n if d in kept else 1 for d, n in enumerate(shape)))
    is_product = dice.flip()
    make = dice.pick((jnp.asarray, np.asarray))

    def apply(x):
        constant = make(array, x.dtype)
        return x * constant if is_product else constant - x

    return elementwise("constant", apply)


def affine(dice: Dice, shape: Shape) -> Layer:
    """Scales and biases along some dimensions."""
    kept = dice.some(len(shape))
    weight = Weight(tuple(n if d in kept else 1 for d, n in enumerate(shape)))
    return Layer("affine", lambda weights, key, x: x * (1 + weights[0]) + weights[1], (weight, weight))


def softmax(dice: Dice, shape: Shape) -> Layer:
    """Along one dimension or all of some; what it forgets is added, lest gradients be rounding and nothing else."""
    dims = dice.some(len(shape))
    normalised = dice.pick((jax.nn.softmax, jax.nn.log_softmax))
    return elementwise(f"softmax {dims}", lambda x: normalised(x, axis=dims) + 0.1 * x)


def norm(dice: Dice, shape: Shape) -> Layer:
    """Centred or not; what it forgets is added."""
    dims, is_centred = dice.some(len(shape)), dice.flip()

    def apply(weights, key, x):
        centred = x - x.mean(dims, keepdims=True) if is_centred else x
        return centred * lax.rsqrt(jnp.mean(centred**2, dims, keepdims=True) + 0.1) * weights + 0.1 * x

    return Layer(
        f"norm {dims}", apply, Weight(tuple(shape[d] if d in dims else 1 for d in range(len(shape))))
    )


# --- reductions

REDUCTIONS = {
    "mean": jnp.mean,
    "sum": lambda x, axis, keepdims: jnp.sum(0.2 * x, axis, keepdims=keepdims),
    "max": lambda x, axis, keepdims: jnp.max(distinct(x), axis, keepdims=keepdims),
    "min": lambda x, axis, keepdims: jnp.min(distinct(x), axis, keepdims=keepdims),
    "product": lambda x, axis, keepdims: jnp.prod(1 + 0.1 * jnp.tanh(x), axis, keepdims=keepdims),
    "logsumexp": jax.nn.logsumexp,
    "variance": lambda x, axis, keepdims: jnp.var(distinct(x), axis, keepdims=keepdims),
    "norm": lambda x, axis, keepdims: jnp.sqrt(jnp.sum(x**2, axis, keepdims=keepdims) + 0.1),
    "share": lambda x, axis, keepdims: (
        jnp.mean(x > 0.1, axis, keepdims=keepdims) + jnp.mean(x, axis, keepdims=keepdims)
    ),
    "any": lambda x, axis, keepdims: jnp.where(
        jnp.any(x > 1.5, axis, keepdims=keepdims), 0.5, jnp.mean(x, axis, keepdims=keepdims)
    ),
}


def reduction(dice: Dice, shape: Shape) -> Layer:
    name, dims, is_kept = dice.pick(list(REDUCTIONS)), dice.some(len(shape)), dice.flip()
    return elementwise(f"{name} {dims}", lambda x: REDUCTIONS[name](x, axis=dims, keepdims=is_kept))


def arg_reduction(dice: Dice, shape: Shape) -> Layer:
    """Where the largest or smallest is, as a mask."""
    dim, chosen = dice.below(len(shape)), dice.pick((jnp.argmax, jnp.argmin))
    return elementwise(
        f"{chosen.__name__} {dim}",
        lambda x: (
            x * (0.5 + jax.nn.one_hot(chosen(distinct(x), axis=dim), x.shape[dim], axis=dim, dtype=x.dtype))
        ),
    )


CUMULATIVES = {
    "cumsum": lambda x, axis, reverse: 0.3 * lax.cumsum(x, axis, reverse),
    "cumprod": lambda x, axis, reverse: lax.cumprod(1 + 0.1 * jnp.tanh(x), axis, reverse) + 0.1 * x,
    "cummax": lambda x, axis, reverse: lax.cummax(distinct(x), axis, reverse) + 0.1 * x,
    "cumlogsumexp": lambda x, axis, reverse: lax.cumlogsumexp(x, axis, reverse),
}


def cumulative(dice: Dice, shape: Shape) -> Layer:
    name, dim, is_reversed = dice.pick(list(CUMULATIVES)), dice.below(len(shape)), dice.flip()
    return elementwise(f"{name} {dim}", lambda x: CUMULATIVES[name](x, dim, is_reversed))


def triangle(dice: Dice, shape: Shape) -> Layer | None:
    half = dice.pick((jnp.tril, jnp.triu))
    return elementwise(half.__name__, lambda x: half(x) + 0.1 * x) if len(shape) > 1 else None


def diagonal(dice: Dice, shape: Shape) -> Layer | None:
    """JAX gathers it one way or another, by the platform."""
    if len(shape) < 2:
        return None
    first, second = dice.order(len(shape))[:2]
    return elementwise(f"diagonal {first} {second}", lambda x: jnp.diagonal(x, axis1=first, axis2=second))


ALGEBRA = (
    dense,
    dense,
    einsum,
    gram,
    attention,
    function,
    function,
    with_constant,
    affine,
    softmax,
    norm,
    reduction,
    reduction,
    arg_reduction,
    cumulative,
    triangle,
    diagonal,
)


# --- of two activations

PAIRED = {
    "sum": lambda x, y: 0.7 * x + y,
    "product": lambda x, y: x * jax.nn.sigmoid(y),
    "larger": lambda x, y: jnp.maximum(distinct(x), y),
    "select": lambda x, y: jnp.where(y > 0.2, x, 0.3 * y),
    "angle": lambda x, y: jnp.arctan2(x, 1 + y**2),
    "complex": lambda x, y: jnp.abs(lax.complex(x, y + 2)),
}


def pair(dice: Dice, first: Shape, second: Shape) -> Layer:
    """Elementwise, the second reduced over what does not suit the first, and broadcast."""
    name = dice.pick(list(PAIRED))

    def apply(weights, key, x, y):
        y = y.reshape((1,) * (x.ndim - y.ndim) + y.shape)
        y = y.mean(tuple(range(y.ndim - x.ndim)))
        unlike = tuple(d for d in range(x.ndim) if y.shape[d] != x.shape[d])
        return PAIRED[name](x, y.mean(unlike, keepdims=True))

    return Layer(f"pair {name}", apply)


def contraction(dice: Dice, first: Shape, second: Shape) -> Layer:
    """A product of two activations: of dimensions of equal size some are contracted, some are batches."""
    of_x, of_y, free = LETTERS[: len(first)], "", list("stuv")
    left = list(zip(of_x, first, strict=True))
    for size in second:
        alike = [c for c, n in left if n == size]
        of_y += dice.pick(alike) if alike and dice.flip(0.8) else free.pop()
        left = [(c, n) for c, n in left if c not in of_y]
    shared = [c for c in of_y if c in of_x]
    summed = set(shared[: dice.between(0, len(shared))])
    made = _shuffled(dice, [c for c in dict.fromkeys(of_x + of_y) if c not in summed])
    formula = f"{of_x},{of_y}->{made}"
    scale = float(np.prod([first[of_x.index(c)] for c in summed]) ** -0.5)
    return Layer(
        f"contraction {formula}", lambda weights, key, x, y: jnp.einsum(formula, x, jnp.tanh(y)) * scale
    )


def joined(dice: Dice, first: Shape, second: Shape) -> Layer | None:
    """Put side by side along a dimension in which they may differ."""
    if len(first) != len(second):
        return None
    unlike = [d for d in range(len(first)) if first[d] != second[d]]
    if len(unlike) > 1:
        return None
    dim = unlike[0] if unlike else dice.below(len(first))
    return Layer(f"joined {dim}", lambda weights, key, x, y: lax.concatenate([x, y], dim))


def stacked(dice: Dice, first: Shape, second: Shape) -> Layer | None:
    dim = dice.below(len(first) + 1)
    return Layer("stacked", lambda weights, key, x, y: jnp.stack([x, y], dim)) if first == second else None


def switched(dice: Dice, first: Shape, second: Shape) -> Layer:
    """Which branch is taken hangs on another activation."""
    return Layer(
        "switched",
        lambda weights, key, x, y: lax.switch(
            jnp.argmax(distinct(y.ravel()[:3])), [jnp.sin, lambda x: 0.5 * x, jnp.tanh], x
        ),
    )


OF_TWO = (pair, pair, contraction, contraction, joined, joined, stacked, switched)


def _one_and_the_others(dice: Dice, rank: int) -> tuple[int, list[int]]:
    one = dice.below(rank)
    return one, [d for d in range(rank) if d != one]


def _shuffled(dice: Dice, letters: list[str]) -> str:
    return "".join(letters[i] for i in dice.order(len(letters)))
