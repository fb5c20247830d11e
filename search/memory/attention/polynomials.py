"""The meaning of values behind a softmax, as polynomials (see the package)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from autoshard.search.ir.graph import Op
from autoshard.search.memory.attention.names import Shape

Monomial = tuple[int, int, str]
"""A power of E, a power of L, and one of the atoms below."""

ONE, DP, R = "1", "DP", "R"

Polynomial = dict[Monomial, float]

EXPONENTIAL: Polynomial = {(1, 0, ONE): 1.0}
PROBABILITY: Polynomial = {(1, -1, ONE): 1.0}
SCORE_GRADIENT: Polynomial = {(1, -1, DP): 1.0, (1, -2, R): -1.0}


@dataclass(frozen=True, slots=True)
class Fact:
    """The meaning of a value: a polynomial, whether the mask hides it, and its dimensions. A value without a polynomial is
    one of the attention's operands or results, by its kind."""

    shape: Shape
    terms: tuple[tuple[Monomial, float], ...] = ()
    is_masked: bool = False

    @property
    def polynomial(self) -> Polynomial:
        return dict(self.terms)


def fact_of(shape: Shape, terms: Polynomial, is_masked: bool = False) -> Fact:
    kept = {m: c for m, c in terms.items() if c != 0.0}
    return Fact(shape, tuple(sorted(kept.items())), is_masked)


def means(fact: Fact, wanted: Polynomial, scale: float | None = None) -> bool:
    """Whether a polynomial is the wanted one, up to rounding."""
    found, factor = fact.polynomial, 1.0 if scale is None else scale
    return found.keys() == wanted.keys() and all(
        isclose(found[m], factor * c, rel_tol=1e-3) for m, c in wanted.items()
    )


Rule = Callable[[Op, Sequence[Polynomial]], Polynomial | None]
"""(op, polynomials of its operands) -> the polynomial of its result; None if it is none."""


def _sum(sign: float) -> Rule:
    def of(op: Op, terms: Sequence[Polynomial]) -> Polynomial:
        left, right = terms
        return {m: left.get(m, 0.0) + sign * right.get(m, 0.0) for m in dict.fromkeys((*left, *right))}

    return of


def _times(op: Op, terms: Sequence[Polynomial]) -> Polynomial | None:
    made: Polynomial = {}
    for (e, power, a), c in terms[0].items():
        for (f, other, b), d in terms[1].items():
            if ONE not in (a, b):
                return None
            m = (e + f, power + other, b if a == ONE else a)
            made[m] = made.get(m, 0.0) + c * d
    return made


def _power(terms: Polynomial, exponent: int) -> Polynomial | None:
    if len(terms) != 1:
        return None
    (((e, power, a), c),) = terms.items()
    return {(e * exponent, power * exponent, a): c**exponent} if a == ONE and c else None


def _divided(op: Op, terms: Sequence[Polynomial]) -> Polynomial | None:
    inverse = _power(terms[1], -1)
    return None if inverse is None else _times(op, (terms[0], inverse))


ARITHMETIC: Mapping[str, Rule] = {
    "add": _sum(1.0),
    "add_any": _sum(1.0),
    "sub": _sum(-1.0),
    "mul": _times,
    "div": _divided,
    "neg": lambda op, terms: {m: -c for m, c in terms[0].items()},
    "integer_pow": lambda op, terms: _power(terms[0], op.params["y"]),
    "square": lambda op, terms: _power(terms[0], 2),
}
"""By elementwise op, its rule."""
