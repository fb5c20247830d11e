"""`autoshard what-if`: a sweep on all cores, whose rows so far are printed after Ctrl-C."""

import argparse
import json
import os

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.whole_file import write_whole
from autoshard.display import say, shown
from autoshard.interrupts import INTERRUPTED
from autoshard.sweep.cases import cases
from autoshard.sweep.chart import page
from autoshard.sweep.rows import WhatIf
from autoshard.sweep.searches import OfTarget
from autoshard.sweep.table import table
from autoshard.sweep.what_if import SweepRequest, in_order


def swept(options: argparse.Namespace) -> int:
    """Plans the step for each combination, and prints the rows."""
    sweep = SweepRequest(
        cases(options.clusters, options.memory or (), options.devices or ()),
        options.steps,
        options.tokens,
        _prices(options.price),
        options.time_limit,
    )
    found: dict[int, WhatIf] = {}
    was_interrupted = False
    try:
        with shown() as progress:
            source = OfTarget(options.target, tuple(options.state) if options.state else None)
            found.update(sweep.rows(source, _cores(), progress))
    except KeyboardInterrupt:
        was_interrupted = True
    rows = in_order(found)
    if rows:
        _print(rows, options)
    if was_interrupted:
        say(f"interrupted: {len(rows)} of {len(sweep.cases)} rows were found")
        return INTERRUPTED
    return 0 if any(row.plan is not None for row in rows) else InfeasibleError.exit_status


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print(rows: tuple[WhatIf, ...], options: argparse.Namespace) -> None:
    if options.html is not None:
        write_whole(options.html, page(options.target, rows), "the plot")
    print(json.dumps([row.to_json() for row in rows], indent=1) if options.json else table(rows), flush=True)


def _prices(pairs: list[tuple[str, float]]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for kind, price in pairs:
        if prices.setdefault(kind, price) != price:
            raise InputError(
                f"--price {kind} is given twice: as {prices[kind]} and as {price}. Keep one of them"
            )
    return prices
