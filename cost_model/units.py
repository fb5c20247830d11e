"""Conversion between text with units and numbers in SI units.

Inside autoshard every quantity is a number in bytes, seconds, bytes per second or FLOP per second. This module
converts text to such a number and back. It has three kinds of function:

  * `parse_*` reads text that people write (`"70GiB"`, `"400Gb/s"`). A quantity is finite and not negative, and
    carries its unit: a lower-case `b` is a bit, an upper-case `B` a byte, so case matters.
  * `format_*` writes for people: three significant digits (`"70 GiB"`).
  * `exact_*` writes for files: short text that parses back to exactly the same number.
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real

from autoshard.cost_model.errors import InputError

Scales = dict[str, Decimal]
"""Units and their size in the SI unit, smallest first."""

_SI = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_IEC = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}


def _si(unit: str, size: Decimal = Decimal(1)) -> Scales:
    return {prefix + unit: size * 10**power for prefix, power in _SI.items()}


_BITS_PER_BYTE = Decimal(8)
_IEC_BYTES: Scales = {"B": Decimal(1)} | {f"{prefix}B": Decimal(2**power) for prefix, power in _IEC.items()}
_BYTES: Scales = _IEC_BYTES | _si("B") | {"KB": Decimal(1000)}
_COUNTS: Scales = _si("")
_SECONDS: Scales = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_BYTES_PER_S: Scales = _si("B/s")
_BITS_PER_S: Scales = _si("b/s", 1 / _BITS_PER_BYTE)
_IEC_BYTES_PER_S: Scales = {f"{unit}/s": size for unit, size in _IEC_BYTES.items()}
_RATES: Scales = _BYTES_PER_S | _BITS_PER_S | _IEC_BYTES_PER_S
_FLOPS_PER_S: Scales = _si("FLOP/s")
_NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([a-z/]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(value: str | int) -> int:
    """A size in bytes, from text such as `"70GiB"` or `"80GB"`, or from a whole number of bytes.

    A fraction of a byte is dropped, so that a cap is never rounded up.

    Raises:
      InputError: no number, no known unit, negative, not finite.

    Example:
      >>> parse_bytes("1.5KiB")
      1536
    """
    if isinstance(value, str):
        return int(_parse(value, "a size", _BYTES, example="70GiB"))
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value).is_integer():
        raise InputError(
            f"wanted a size as text with a unit (such as '70GiB') or a whole number of bytes, got {value!r}"
        )
    if value < 0:
        raise InputError(f"a size cannot be negative, got {value!r} bytes")
    return int(value)


def parse_rate(text: str) -> float:
    """A bandwidth in bytes per second; `"400Gb/s"` is bits, `"50GB/s"` bytes.

    Raises:
      InputError: no number, no known unit, negative, not finite.

    Example:
      >>> parse_rate("400Gb/s")
      50000000000.0
    """
    return float(_parse(text, "a bandwidth", _RATES, example="450GB/s"))


def parse_seconds(text: str) -> float:
    """A time in seconds, from text such as `"5us"`.

    Raises:
      InputError: no number, no known unit, negative, not finite.

    Example:
      >>> parse_seconds("1.5min")
      90.0
    """
    return float(_parse(text, "a time", _SECONDS, example="5us"))


def parse_flops(text: str) -> float:
    """A computing speed in FLOP per second, from text such as `"989TFLOP/s"`.

    Raises:
      InputError: no number, no known unit, negative, not finite.

    Example:
      >>> parse_flops("989TFLOP/s")
      989000000000000.0
    """
    return float(_parse(text, "a computing speed", _FLOPS_PER_S, example="989TFLOP/s"))


def format_bytes(num_bytes: float) -> str:
    """A size for people, in binary units: `format_bytes(75161927680) == "70 GiB"`."""
    return _format(num_bytes, _IEC_BYTES)


def format_seconds(seconds: float) -> str:
    """A time for people: `format_seconds(0.0125) == "12.5 ms"`."""
    return _format(seconds, _SECONDS)


def format_rate(bytes_per_s: float) -> str:
    """A bandwidth for people: `format_rate(4.5e11) == "450 GB/s"`."""
    return _format(bytes_per_s, _BYTES_PER_S)


def format_flops(flops_per_s: float) -> str:
    """A computing speed for people: `format_flops(9.89e14) == "989 TFLOP/s"`."""
    return _format(flops_per_s, _FLOPS_PER_S)


def format_count(number: float) -> str:
    """A large number for people: `format_count(6240000) == "6.24M"`."""
    return _format(number, _COUNTS).replace(" ", "")


def format_mesh(shape: Sequence[int]) -> str:
    """`2x4`: sizes of a mesh's axes, as the command line takes them."""
    return "x".join(map(str, shape))


def exact_bytes(num_bytes: int) -> str:
    """A size for files, in the largest binary unit that divides it: `exact_bytes(2048) == "2KiB"`."""
    unit, size = next(
        (unit, int(size)) for unit, size in reversed(_IEC_BYTES.items()) if num_bytes % int(size) == 0
    )
    return f"{num_bytes // size}{unit}" if num_bytes else "0B"


def exact_seconds(seconds: float) -> str:
    """A time for files: `exact_seconds(5e-6) == "5us"`."""
    return _exact(seconds, {unit: size for unit, size in _SECONDS.items() if size <= 1})


def exact_rate(bytes_per_s: float) -> str:
    """A bandwidth for files: `exact_rate(4.5e11) == "450GB/s"`."""
    return _exact(bytes_per_s, _BYTES_PER_S)


def exact_flops(flops_per_s: float) -> str:
    """A computing speed for files: `exact_flops(9.89e14) == "989TFLOP/s"`."""
    return _exact(flops_per_s, _FLOPS_PER_S)


def _parse(text: object, wanted: str, scales: Scales, example: str) -> Decimal:
    units = ", ".join(scales)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"wanted {wanted} such as {example!r}, got {text!r}; units: {units}")
    number, unit = match.groups()
    if not math.isfinite(float(number)) or float(number) < 0:
        raise InputError(f"{wanted} must be finite and not negative, got {text!r}")
    if unit not in scales:
        came = f"the unit {unit!r} in {text!r}" if unit else f"{text!r} without a unit"
        raise InputError(f"wanted {wanted} such as {example!r}, got {came}; units (case matters): {units}")
    if not float(number):
        return Decimal(0)
    value = Decimal(number) * scales[unit]
    if not math.isfinite(float(value)):
        raise InputError(f"{wanted} must be finite and not negative, got {text!r}")
    return value


def _format(value: float, scales: Scales) -> str:
    if not math.isfinite(value):
        return str(value)
    smallest = next(iter(scales))
    fitting = (unit for unit in reversed(scales) if abs(float(f"{value / float(scales[unit]):.3g}")) >= 1)
    unit = next(fitting, smallest) if value else _base(scales)
    rounded = float(f"{value / float(scales[unit]):.3g}")
    return f"{rounded:g} {unit}"


def _base(scales: Scales) -> str:
    return next(unit for unit, size in scales.items() if size == 1)


def _exact(value: float, scales: Scales) -> str:
    exact = Decimal(repr(value))
    unit = next((unit for unit in reversed(scales) if exact >= scales[unit]), _base(scales))
    number = (exact / scales[unit]).normalize()
    return f"{number:f}{unit}"
