"""The words behind an argument's spec in a plan that say where it rests: `P('data') on host, updated there`."""

ON_HOST = " on host"
"""Suffix of the spec of an argument that rests in the host's memory."""

UPDATED = ", updated there"
"""Suffix behind `ON_HOST`, if the host also updates the argument."""


def is_on_host(text: str) -> bool:
    """True if a plan's text of an argument rests it in the host's memory."""
    return text.removesuffix(UPDATED).endswith(ON_HOST)


def without_place(text: str) -> str:
    """The spec in a plan's text of an argument."""
    return text.removesuffix(UPDATED).removesuffix(ON_HOST)
