"""Training steps that nobody would write: drawn at random, whatever JAX offers, at sizes of all kinds.

`draw_step` draws a network and all around it: inputs, losses, an optimizer, how the state is packed and what is
reported. It is data (`Drawn`), so that it can be printed and made smaller.

Numbers must not hang on rounding, or no two ways to compute them agree. So nothing is chosen among entries that may be
equal (`layer.distinct` sets them apart), thresholds are no values that arithmetic of small numbers gives, and what a
layer forgets of its input (a softmax the shift, a norm the mean) is added to its result: else some gradients are sums that
cancel, and an optimizer that divides by their size, or takes their sign, makes a number of what is none.
"""

from .dice import Dice
from .manners import Mannered, draw_mannered
from .step import Drawn, draw_step

__all__ = ["Dice", "Drawn", "Mannered", "draw_mannered", "draw_step"]
