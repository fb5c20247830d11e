"""Recomputed and offloaded values as text, and text as sites.

A plan names recomputed ops by class, like its other decisions. The key is the op's phase, scope and primitive, with `*`
for numbers if it represents several ops. The value is `remat`; if it is not for all ops of the class, it has their
numbers in program order: `remat 0-11, 20 of 48`. `offload` keeps the ops' results in the host's memory.

For a loop, `remat in segments of 512, 64` cuts it into segments of 512 iterations, and these into segments of 64, which
recompute their residuals (`search.memory.loop_segments`). With `before 3072`, iterations from there on keep theirs.
`offload` of a loop is for its carries. A residual without a decision is kept on the device.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.graph import Graph, Phase, Site, walk
from autoshard.search.memory.loop_offload import may_leave_loop
from autoshard.search.memory.loop_segments import LoopSegments, check_segments, cut_loop, segments_site
from autoshard.search.plan.names import scoped_name, unique
from autoshard.search.plan.number_ranges import numbers_of, ranges
from autoshard.search.problem.folding import FoldedProgram

_SOME = re.compile(r"(?:remat|offload) (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*) of (\d+)")

_IN_SEGMENTS = re.compile(r"(remat(?: [\d, -]+ of \d+)?) in segments of (\d+(?:, \d+)*)(?: before (\d+))?")

_NO_RESULTS = ("input", "output", "enter", "slice")
"""Boundaries that represent no result of an op."""


class CoarseError(Exception):
    """A plan recomputes only some of the ops that one op of a shortened step represents."""


class RetentionCodec:
    """The texts of one folded program."""

    def __init__(self, folded: FoldedProgram) -> None:
        self._folded = folded

    @cached_property
    def sites(self) -> dict[str, tuple[Site, ...]]:
        """By name, the sites of the forward ops of a class, in program order."""
        return {name: tuple(here) for name, here in self._numbers.items()}

    @cached_property
    def _graphs(self) -> dict[Site, Graph]:
        """The graphs of the step, by path."""
        return dict(walk(self._folded.program.step.graph))

    @cached_property
    def _numbers(self) -> dict[str, dict[Site, range]]:
        """By name and site, the numbers, in its class, of the ops that it is or represents."""
        seen: dict[str, int] = {}
        known: set[Site] = set()
        found: dict[str, dict[Site, range]] = {}
        program = self._folded.program
        graphs = self._graphs
        for members in self._folded.members:
            standing = [program.ops[i] for i in members if program.ops[i].phase is Phase.FORWARD]
            fresh: dict[Site, int] = {
                op.site: op.repeats
                for op in standing
                if not (op.is_boundary and op.name in _NO_RESULTS) and op.site not in known
            }
            known.update(fresh)
            if fresh:
                site = next(iter(fresh))
                index: int = site[-1]
                first = graphs[site[:-1]].ops[index]
                name = f"{first.phase} {scoped_name(first, sum(fresh.values()) > 1)}"
                found[unique(name, seen)] = _in_program_order(fresh, graphs[()])
        return found

    def decisions(self, sites: Iterable[Site], offloaded: Iterable[Site] = ()) -> dict[str, str]:
        """The decisions that recompute some sites, and keep the results of others on the host."""
        asked = _asked(sites, offloaded)
        texts: dict[str, str] = {}
        for name, here in self._numbers.items():
            count = sum(map(len, here.values()))
            for (how, suffix), left in asked.items():
                members = [n for site, numbers in here.items() if site in left for n in numbers]
                if members:
                    some = f" {ranges(members, ', ')} of {count}" if len(members) < count else ""
                    one = f"{how}{some}{suffix}"
                    texts[name] = f"{texts[name]}; {one}" if name in texts else one
                    left.difference_update(here)
        assert not any(asked.values()), f"no class has the sites {asked}"
        return texts

    def read(self, texts: Mapping[str, str], place: str) -> tuple[frozenset[Site], frozenset[Site]]:
        """The sites that decisions recompute, and those whose results they keep on the host.

        Raises:
          PlanError: a decision names no op of this step, or its text is not possible.
          CoarseError: a decision separates ops that one op represents.
        """
        found: dict[str, set[Site]] = {"remat": set(), "offload": set()}
        for name, text in texts.items():
            if name not in self._numbers:
                raise PlanError(f"{place}: retention {name!r} names no forward op of this step")
            here = self._numbers[name]
            count = sum(map(len, here.values()))
            for one in text.split("; "):
                one, segments = _without_segments(one)
                how, members = one.split(" ", 1)[0], _members(one, count)
                graph = self._graphs[()]
                may_be = how == "remat" or all(len(site) == 1 or may_leave_loop(graph, site) for site in here)
                if members is None or not may_be:
                    raise PlanError(
                        f"{place}: retention {name!r} cannot be {text!r}. Say 'remat' or, of what is made outside of loops "
                        f"or stacked up by one, 'offload', or which of them: 'remat 0-{count - 1} of {count}', "
                        "both with '; ' in between, or leave it out to keep all"
                    )
                some = _standing_for(members, here)
                if segments:
                    some = (self._cut(site, segments, f"{place}: retention {name!r}") for site in some)
                found[how].update(some)
        return frozenset(found["remat"]), frozenset(found["offload"])

    def _cut(self, loop: Site, segments: LoopSegments, place: str) -> Site:
        """The site of a loop that is cut into segments.

        Raises:
          PlanError: it cannot be cut so.
        """
        check_segments(self._graphs[loop[:-1]], loop[-1], segments, place)
        return segments_site(loop, segments)


def _asked(sites: Iterable[Site], offloaded: Iterable[Site]) -> dict[tuple[str, str], set[Site]]:
    """By kind of decision, with its segments: the ops that it is for."""
    asked: dict[tuple[str, str], set[Site]] = {("remat", ""): set(), ("offload", ""): set(offloaded)}
    for site in sites:
        loop, segments = cut_loop(site)
        asked.setdefault(("remat", _segments_text(segments) if segments else ""), set()).add(loop)
    return dict(sorted(asked.items(), reverse=True))


def _segments_text(segments: LoopSegments) -> str:
    end = "" if segments.end is None else f" before {segments.end}"
    return f" in segments of {', '.join(map(str, segments.lengths))}{end}"


def _without_segments(text: str) -> tuple[str, LoopSegments | None]:
    """A decision without its segments, and the segments."""
    match = _IN_SEGMENTS.fullmatch(text)
    if match is None:
        return text, None
    return match[1], LoopSegments(tuple(map(int, match[2].split(", "))), int(match[3]) if match[3] else None)


def _in_program_order(repeats: Mapping[Site, int], graph: Graph) -> dict[Site, range]:
    """By site, the numbers of the ops of the whole step that it is or represents. If a block that represents several
    has more than one op of a class, these take turns in each of the blocks."""

    def block_of(site: Site) -> int | Site:
        index: int = site[0]
        op = graph.ops[index]
        return site if op.equivalence is None or op.equivalence.place is None else op.equivalence.block

    found: dict[Site, range] = {}
    start = 0
    for _, run in groupby(repeats, block_of):
        sites = tuple(run)
        end = start + repeats[sites[0]] * len(sites)
        found.update({site: range(start + n, end, len(sites)) for n, site in enumerate(sites)})
        start = end
    return found


def _standing_for(members: Collection[int], here: Mapping[Site, range]) -> Iterator[Site]:
    """The sites that represent some of a class's ops.

    Raises:
      CoarseError: one represents others, too.
    """
    wanted = set(members)
    for site, numbers in here.items():
        if not wanted.isdisjoint(numbers):
            if not wanted.issuperset(numbers):
                raise CoarseError
            yield site


def _members(text: str, count: int) -> list[int] | None:
    """The numbers in its class of the ops that a decision is for; None if it makes no sense."""
    if text in ("remat", "offload"):
        return list(range(count))
    match = _SOME.fullmatch(text)
    if match is None or int(match[2]) != count:
        return None
    members = numbers_of(match[1])
    return members if all(n < count for n in members) else None
