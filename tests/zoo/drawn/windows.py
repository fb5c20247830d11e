"""Convolutions and pooling, over one or two dimensions."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from .dice import Dice
from .layer import Layer, Shape, Weight, distinct, elementwise


def convolution(dice: Dice, shape: Shape) -> Layer | None:
    """In any layout; strided, dilated, grouped or transposed; batch and features are any two dimensions."""
    if len(shape) not in (3, 4):
        return None
    spatial = "DW"[: len(shape) - 2]
    of_x, of_w, made = (_shuffled(dice, letters + spatial) for letters in ("NC", "IO", "NC"))
    features = shape[of_x.index("C")]
    groups = dice.pick([n for n in range(1, features + 1) if features % n == 0]) if dice.flip(0.3) else 1
    sizes = {"I": features // groups, "O": groups * dice.pick((1, 2, 3, 4))}
    kernel = tuple(sizes.get(letter) or dice.between(1, 3) for letter in of_w)
    stride, dilation, spread = (tuple(dice.pick((1, 1, 2)) for _ in spatial) for _ in range(3))
    wide = [(1, 2)] * len(spatial)
    padding = dice.pick(("SAME", "VALID", wide)) if max(spread) == 1 else wide

    def apply(weights, key, x):
        return lax.conv_general_dilated(
            x,
            weights,
            stride,
            padding,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=(of_x, of_w, made),
            feature_group_count=groups,
        )

    return Layer(f"convolution {of_x} {of_w} {kernel} groups {groups}", apply, Weight(kernel))


def same_convolution(dice: Dice, shape: Shape) -> Layer | None:
    """As most networks have it: the shape stays, what came in is added."""
    if len(shape) not in (3, 4):
        return None
    features, spatial = shape[-1], "HW"[: len(shape) - 2]
    layout = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")

    def apply(weights, key, x):
        ones = (1,) * len(spatial)
        return x + lax.conv_general_dilated(x, weights, ones, "SAME", dimension_numbers=layout)

    return Layer("same convolution", apply, Weight((*[3] * len(spatial), features, features)))


POOLS = {
    "max": lambda x, *window: lax.reduce_window(distinct(x), -np.inf, lax.max, *window),
    "min": lambda x, *window: lax.reduce_window(distinct(x), np.inf, lax.min, *window),
    "sum": lambda x, *window: 0.3 * lax.reduce_window(x, 0.0, lax.add, *window),
}


def pooling(dice: Dice, shape: Shape) -> Layer:
    """Over windows in one or two dimensions, wherever they are."""
    name, dims = dice.pick(list(POOLS)), dice.some(len(shape))[:2]
    window = tuple(dice.pick((2, 3)) if d in dims else 1 for d in range(len(shape)))
    strides = tuple(dice.pick((1, 2)) if d in dims else 1 for d in range(len(shape)))
    padding = dice.pick(("SAME", "VALID"))
    return elementwise(
        f"{name} pool {window} {strides} {padding}", lambda x: POOLS[name](x, window, strides, padding)
    )


def differences(dice: Dice, shape: Shape) -> Layer:
    """Of neighbours, as a stencil does it."""
    dim = dice.below(len(shape))
    return elementwise(f"differences {dim}", lambda x: jnp.diff(x, axis=dim, append=0) + 0.3 * x)


WINDOWS = (convolution, convolution, same_convolution, pooling, differences)


def _shuffled(dice: Dice, letters: str) -> str:
    return "".join(letters[i] for i in dice.order(len(letters)))
