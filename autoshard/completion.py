"""Completion of the command line in a shell, by argcomplete, which is an optional dependency (`autoshard[completion]`).

The shell runs `autoshard` with `_ARGCOMPLETE` in its environment when the user presses Tab. Only then is argcomplete
imported, and the program ends with the words that may follow. Clusters are completed from the presets.
"""

import argparse
import os
import re
import sys
from typing import Any


def offer(parser: argparse.ArgumentParser) -> None:
    """Prints what may follow, and ends the program, if a shell asks for that."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete  # only where a shell asks
    except ModuleNotFoundError:
        return
    argcomplete.autocomplete(parser, exit_method=sys.exit)


def clusters(prefix: str, **_: Any) -> list[str]:
    """The clusters that begin so: presets behind a count, by default that of a full node; the last of several.

    Example:
      >>> clusters("8xL4+64xH2")
      ['8xL4+64xH200', '8xL4+64xH200-Ethernet']
    """
    from autoshard.cost_model.hardware import preset_names
    from autoshard.cost_model.presets import node_devices

    before = re.match(r".*[+,]|", prefix)[0]  # type: ignore[index]  # an empty text fits
    counted = re.match("[1-9][0-9]*x", prefix.removeprefix(before))
    offered = (
        f"{before}{counted[0] if counted else f'{node_devices(gpu)}x'}{name}"
        for name, (gpu, _) in preset_names().items()
    )
    return [one for one in offered if one.startswith(prefix)]


def completes_clusters(action: argparse.Action) -> None:
    """Marks an argument as a cluster, for argcomplete."""
    action.completer = clusters  # type: ignore[attr-defined]
