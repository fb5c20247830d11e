"""One equation of a jaxpr as an expression in Python.

A primitive without parameters is written as the function of `jax.lax` that has its name, or by a template, as operators are.
One with parameters has a line in a table. Others cannot be written, and neither can a parameter without source
(`source.text`); such equations are reported and never approximated.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.ejection.source import UnwritableError, dtype, sequence, text

Operands = Sequence[str]
Params = Mapping[str, Any]

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "add": "{} + {}",
        "add_any": "{} + {}",
        "sub": "{} - {}",
        "mul": "{} * {}",
        "eq": "{} == {}",
        "ne": "{} != {}",
        "lt": "{} < {}",
        "le": "{} <= {}",
        "gt": "{} > {}",
        "ge": "{} >= {}",
        "and": "{} & {}",
        "or": "{} | {}",
        "xor": "{} ^ {}",
        "neg": "-{}",
        "not": "~{}",
        "max": "jnp.maximum({}, {})",
        "min": "jnp.minimum({}, {})",
        "copy": "jnp.copy({})",
        "random_unwrap": "jax.random.key_data({})",
        "random_fold_in": "jax.random.fold_in({}, {})",
    }
)
"""By primitive without parameters, its call. Of all others the function of `jax.lax` has the primitive's name."""

IGNORED = frozenset({"sharding", "out_sharding", "accuracy", "unreduced"})
"""Parameters that are always None in a program under automatic axes."""


def _keywords(function: str, *names: str, variadic: bool = False) -> Callable[[Operands, Params], str]:
    """A call of the function of `jax.lax` whose keywords are the primitive's parameters of these names."""

    def written(operands: Operands, params: Params) -> str:
        first = sequence(tuple(operands)) if variadic else ", ".join(operands)
        keywords = (f"{name}={text(params[name])}" for name in names if params.get(name) is not None)
        return f"{function}({', '.join(filter(None, (first, *keywords)))})"

    return written


def _template(template: str, **parameters: Callable[[Any], str]) -> Callable[[Operands, Params], str]:
    """A call with operands by number and parameters by name, each written by a function of its value."""

    def written(operands: Operands, params: Params) -> str:
        return template.format(*operands, **{name: how(params[name]) for name, how in parameters.items()})

    return written


def _axes(axes: Sequence[Any]) -> str:
    return text(tuple(axes))


def _only(axes: Sequence[int]) -> str:
    (axis,) = axes
    return str(axis)


def _implementation(impl: Any) -> str:
    return text(str(impl.name))


def _scattered(function: str) -> Callable[[Operands, Params], str]:
    return _keywords(f"lax.{function}", "dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def _reshaped(operands: Operands, params: Params) -> str:
    if params["dimensions"] is not None:
        raise UnwritableError("dimensions of a reshape")
    return f"lax.reshape({operands[0]}, {text(params['new_sizes'])})"


def _dynamic_slice(operands: Operands, params: Params) -> str:
    return f"lax.dynamic_slice({operands[0]}, {sequence(tuple(operands[1:]))}, {text(params['slice_sizes'])})"


def _dynamic_update_slice(operands: Operands, params: Params) -> str:
    return f"lax.dynamic_update_slice({operands[0]}, {operands[1]}, {sequence(tuple(operands[2:]))})"


def _sharded(operands: Operands, params: Params) -> str:
    spec: PartitionSpec = params["sharding"].spec
    return f"constrained({operands[0]}, {text(spec)})"


def _moved(operands: Operands, params: Params) -> str:
    (there,) = params["devices"]
    return operands[0] if there is None else f"jax.device_put({operands[0]}, jax.memory.Space.{there.name})"


def _barrier(operands: Operands, params: Params) -> str:
    return f"lax.optimization_barrier({sequence(tuple(operands))})"


def _random_bits(operands: Operands, params: Params) -> str:
    word = {8: "jnp.uint8", 16: "jnp.uint16", 32: "jnp.uint32", 64: "jnp.uint64"}[params["bit_width"]]
    return f"jax.random.bits({operands[0]}, {text(tuple(params['shape']))}, {word})"


def _collective(operands: Operands, params: Params) -> str:
    if params.get("axis_index_groups") is not None:
        raise UnwritableError("groups of a collective")
    inner = operands[0] if len(operands) == 1 else sequence(tuple(operands))
    return f"lax.psum({inner}, {text(tuple(params['axes']))})"


WINDOW = ("window_dimensions", "window_strides", "padding")
DILATED_WINDOW = (*WINDOW, "base_dilation", "window_dilation")


def _windowed(start: str, function: str) -> Callable[[Operands, Params], str]:
    """A reduction over windows, which JAX knows by its start and its function."""

    def written(operands: Operands, params: Params) -> str:
        return _keywords("lax.reduce_window", *DILATED_WINDOW)((operands[0], start, function), params)

    return written


def _window_gradient(operands: Operands, params: Params) -> str:
    """The gradient of a maximum or a minimum over windows, which has no function of its own."""
    start, function = (
        ("-jnp.inf", "lax.max") if params["select_prim"] is jax.lax.ge_p else ("jnp.inf", "lax.min")
    )
    source, operand = operands
    reduced = _keywords("lax.reduce_window", *WINDOW)(("x", start, function), params)
    return f"jax.vjp(lambda x: {reduced}, {operand})[1]({source})[0]"


WRITERS: Mapping[str, Callable[[Operands, Params], str]] = MappingProxyType(
    {
        "integer_pow": _template("lax.integer_pow({0}, {y})", y=str),
        "convert_element_type": _template("{0}.astype({new_dtype})", new_dtype=dtype),
        "iota": _template(
            "lax.broadcasted_iota({dtype}, {shape}, {dimension})", dtype=dtype, shape=text, dimension=str
        ),
        "reshape": _reshaped,
        "broadcast_in_dim": _keywords("lax.broadcast_in_dim", "shape", "broadcast_dimensions"),
        "transpose": _keywords("lax.transpose", "permutation"),
        "squeeze": _keywords("lax.squeeze", "dimensions"),
        "expand_dims": _keywords("lax.expand_dims", "dimensions"),
        "rev": _keywords("lax.rev", "dimensions"),
        "concatenate": _keywords("lax.concatenate", "dimension", variadic=True),
        "unstack": _keywords("lax.unstack", "axis"),
        "bitcast_convert_type": _template("lax.bitcast_convert_type({0}, {new_dtype})", new_dtype=dtype),
        "split": _keywords("lax.split", "sizes", "axis"),
        "pad": _keywords("lax.pad", "padding_config"),
        "slice": _keywords("lax.slice", "start_indices", "limit_indices", "strides"),
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "gather": _keywords(
            *(
                "lax.gather",
                "dimension_numbers",
                "slice_sizes",
                "unique_indices",
                "indices_are_sorted",
                "mode",
            ),
            "fill_value",
        ),
        "scatter": _scattered("scatter"),
        "scatter-add": _scattered("scatter_add"),
        "scatter_add": _scattered("scatter_add"),
        "scatter_mul": _scattered("scatter_mul"),
        "scatter_min": _scattered("scatter_min"),
        "scatter_max": _scattered("scatter_max"),
        "dot_general": _keywords(
            "lax.dot_general", "dimension_numbers", "precision", "preferred_element_type"
        ),
        "conv_general_dilated": _keywords(
            *("lax.conv_general_dilated", "window_strides", "padding", "lhs_dilation", "rhs_dilation"),
            *(
                "dimension_numbers",
                "feature_group_count",
                "batch_group_count",
                "precision",
                "preferred_element_type",
            ),
        ),
        "reduce_precision": _keywords("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
        "round": _keywords("lax.round", "rounding_method"),
        "reduce_window_max": _windowed("-jnp.inf", "lax.max"),
        "reduce_window_min": _windowed("jnp.inf", "lax.min"),
        "reduce_window_sum": _windowed("0.0", "lax.add"),
        "select_and_scatter_add": _window_gradient,
        "sort": _keywords("lax.sort", "dimension", "is_stable", "num_keys", variadic=True),
        "top_k": _keywords("lax.top_k", "k", "axis"),
        "argmax": _template("lax.argmax({0}, {axes}, {index_dtype})", axes=_only, index_dtype=dtype),
        "argmin": _template("lax.argmin({0}, {axes}, {index_dtype})", axes=_only, index_dtype=dtype),
        "sharding_constraint": _sharded,
        "optimization_barrier": _barrier,
        "device_put": _moved,
        "random_bits": _random_bits,
        "random_wrap": _template("jax.random.wrap_key_data({0}, impl={impl})", impl=_implementation),
        "random_seed": _template("jax.random.key({0}, impl={impl})", impl=_implementation),
        "random_split": _template("jax.random.split({0}, {shape})", shape=_axes),
        "psum": _collective,
        "psum_invariant": _collective,
        "ppermute": _template("lax.ppermute({0}, {axis_name}, {perm})", axis_name=text, perm=text),
        "axis_index": _keywords("lax.axis_index", "axis_name"),
    }
    | {
        name: _template(f"lax.{name}({{0}}, {{axes}})", axes=_axes)
        for name in (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "reduce_xor",
        )
    }
    | {
        name: _keywords(f"lax.{name}", "axis", "reverse")
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    }
)
"""By primitive with parameters, what writes its call."""

SEVERAL = frozenset({"optimization_barrier", "split", "sort", "top_k", "unstack"})
"""Primitives whose call returns several results, or one in a tuple."""


def expression(name: str, operands: Operands, params: Params) -> str:
    """An equation's call.

    Raises:
      UnwritableError: the primitive has no public function and no line in the tables, or a parameter has no source.
    """
    if name in WRITERS:
        return WRITERS[name](operands, params)
    if any(value is not None for key, value in params.items() if key not in IGNORED):
        raise UnwritableError("its parameters")
    if name in TEMPLATES:
        return TEMPLATES[name].format(*operands)
    if not callable(getattr(jax.lax, name, None)):
        raise UnwritableError("the primitive")
    return f"lax.{name}({', '.join(operands)})"
