"""Reports as text: whole and harmless HTML, every argument and number of the plan, nothing from the network."""

import html
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoshard import cli
from autoshard.report.argument_tree import ArgumentNode, tree
from autoshard.report.worker_memory import held
from autoshard.search.pipeline.timeline import simulated
from autoshard.search.plan.plan import Candidate, Plan
from autoshard.search.plan.profile import OpTime
from tests.autoshard.report.plans import ARGUMENTS, COLLECTIVES, OPS, one_program, pipeline, profile

VOID = {"meta", "input", "br", "link", "img", "rect", "path"}
MAX_BYTES = 300_000

UNKIND = (
    "state['<script>alert(1)</script>']",
    "state['\"><img src=x onerror=alert(1)>']",
    "state['a & b &amp; c']",
    "state['</script><script>alert(2)</script>']",
)


class Read(HTMLParser):
    """A page as a browser reads it; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts = list[str](), list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID - {"rect", "path"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.tags)


def unkind() -> Plan:
    arguments = {name: ("P('data')", "float32[64] parameter") for name in UNKIND}
    ops = (OpTime(f"forward {UNKIND[1]}", 1, 1e-3, 1e12, 1e9, 989e12),)
    return one_program(
        arguments,
        step=UNKIND[0],
        options={"pin": {UNKIND[1]: "P()"}},
        profile=profile(ops),
        peak_at=UNKIND[3],
        collectives=(replace(COLLECTIVES[0], kind=UNKIND[1]),),
    )


PLANS = {"program": one_program(), "pipeline": pipeline(), "unkind": unkind()}


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_whole_and_its_labels_name_what_is_there(name):
    read = Read(PLANS[name].report())
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len({*ids})
    named = [a[key] for _, a in read.tags for key in ("for", "aria-labelledby") if key in a]
    assert {*named} <= {*ids}
    assert all("aria-label" in a or "aria-hidden" in a for tag, a in read.tags if tag == "svg")


@pytest.mark.parametrize("name", PLANS)
def test_a_page_asks_the_network_for_nothing(name):
    text = PLANS[name].report()
    assert not re.search(
        r"url\(|@import|https?:|<(?:link|img|iframe)\b", text.replace(html.escape(UNKIND[1]), "")
    )
    assert not [a for _, a in Read(text).tags if {"src", "href"} & {*a}]


def test_names_are_text_and_never_markup():
    read, innocent = Read(unkind().report()), Read(one_program().report())
    for tag in ("script", "img", "style"):
        assert read.count(tag) == innocent.count(tag)
    assert not [a for _, a in read.tags if any(key.startswith("on") for key in a)]
    for name in (*UNKIND[1:], UNKIND[0].removeprefix("state")):
        assert name.removeprefix("state") in read.text


def test_a_frame_of_a_notebook_holds_the_page():
    plan = one_program()
    ((tag, attributes),) = Read(plan._repr_html_()).tags
    assert (tag, attributes["srcdoc"], attributes["sandbox"]) == ("iframe", plan.report(), "allow-scripts")


def test_a_plan_is_represented_in_one_line():
    said = repr(one_program())
    assert "\n" not in said
    assert len(said) < 200
    for part in ("'train_step'", "8xH100-80GB", "21 ms", "8 GiB"):
        assert part in said


# --- what a page says


def test_the_answer_stands_before_everything_else():
    text = Read(one_program().report()).text
    order = [
        "Step time 21 ms",
        "Limits the step",
        "Fills the memory",
        "More memory",
        "What runs where",
        "Arguments",
    ]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)


@pytest.mark.parametrize(
    ("compute_s", "hidden_s", "limit"),
    [
        (0.020, 0.002, "Computation: 20 ms of 21 ms"),
        (0.004, 0.0, "Communication: 17 ms of 21 ms"),
        (0.012, 0.0, "Computation and communication: computation takes 12 ms, 9 ms of 21 ms"),
    ],
)
def test_what_takes_most_of_the_step_limits_it(compute_s, hidden_s, limit):
    assert limit in Read(one_program(compute_s=compute_s, hidden_s=hidden_s).report()).text


def test_more_memory_wins_back_no_more_than_is_spent_to_save_it():
    roomy = one_program(peak_bytes=4 << 30)
    assert "Not needed: the plan fills 40% of its cap" in Read(roomy.report()).text
    saving = replace(one_program(recompute_s=3e-3), retention={"forward dot": "remat"}, marks="")
    assert "The savings take 3 ms of the step" in Read(saving.report()).text


def test_every_collective_op_and_resident_is_there():
    plan = one_program()
    text = Read(plan.report()).text
    said = [one.kind for one in COLLECTIVES] + [op.name for op in OPS] + [*plan.estimates.residents]
    assert [one for one in said if one.replace("_", " ") not in text and one not in text] == []


def test_the_certificate_lists_what_was_tried_and_why_it_is_not_the_plan():
    tried = (
        Candidate((2, 4), recomputed=7, bound_s=0.0205, step_s=0.021),
        Candidate((8,), bound_s=0.022),
        Candidate((4, 2), bound_s=0.019, is_ruled_out=True),
        Candidate((8,), microbatches=2, bound_s=0.020),
    )
    text = Read(replace(one_program(), candidates=tried).report()).text
    for row in (
        "2x4 1 7 - 20.5 ms 21 ms the plan",
        "8 1 - - 22 ms - slower",
        "4x2 1 - - 19 ms - no faster one fits",
        "8 2 - - 20 ms - not settled",
    ):
        assert row in text


def test_each_device_stands_in_its_node_with_its_place_on_the_mesh():
    read = Read(one_program().report())
    said = [a["aria-label"] for tag, a in read.tags if tag == "li" and "aria-label" in a]
    assert said == [f"device {n}: data {n // 4}, model {n % 4}" for n in range(8)]


def test_estimates_of_a_plan_that_was_edited_are_left_out():
    plan = one_program()
    (sharding,) = plan.shardings
    edited = replace(plan, shardings=(replace(sharding, ops={"forward dot": "P('data') -> P()"}),))
    text = Read(edited.report()).text
    assert "edited by hand" in text
    assert "Step time" not in text
    assert "Arguments" in text


def test_a_plan_of_an_earlier_version_has_a_page_without_a_profile():
    text = Read(one_program(profile=None, shares=()).report()).text
    assert "no profile over time" in text
    assert "Heavy ops" not in text


# --- arguments


def names(node: ArgumentNode, path: str = "") -> list[str]:
    """The paths of all arguments that a tree stands for."""
    found = re.search(r"(\d+)-(\d+)", node.label)
    numbers = range(int(found[1]), int(found[2]) + 1) if found else [None]
    labels = [node.label if n is None else node.label.replace(found[0], str(n)) for n in numbers]
    assert len(labels) == node.copies
    if node.described:
        return [path + label for label in labels]
    return [name for label in labels for child in node.children for name in names(child, path + label)]


def test_the_tree_stands_for_every_argument_once_and_for_its_bytes():
    root = tree(one_program())
    assert sorted(names(root)) == sorted(ARGUMENTS)
    assert root.count == len(ARGUMENTS)
    assert root.num_bytes == 24 * 1024 * 4096 * 4 // 8 + 4 + 64 * 1024 * 4 // 8


def test_arguments_whose_paths_are_no_tree_are_all_there():
    odd = [
        "a",
        "a.b",
        "a.b['c']",
        "st['w'].value",
        "st['w'].value.more",
        "layer_01['k']",
        "layer_02['k']",
        "[",
        "",
    ]
    arguments = {name: ("P()", "float32[8] parameter") for name in odd}
    found = [leaf for leaf in walk(tree(one_program(arguments))) if leaf.described]
    assert sum(leaf.copies for leaf in found) == len(odd)
    text = Read(one_program(arguments).report()).text
    assert "layer_01" in text
    assert "layer_02" in text


def test_layers_are_one_line_unless_they_differ():
    odd = {**ARGUMENTS, "state.params['block_5']['fc1']": ("P()", "float32[1024,4096] parameter")}
    labels = [node.label for node in walk(tree(one_program(odd)))]
    assert "['block_0-4,6-11']" in labels
    assert "['block_5']" in labels


def walk(node):
    return itertools.chain([node], *map(walk, node.children))


# --- size


def test_a_page_of_a_large_plan_is_small():
    """Four thousand arguments no two of which are alike, and a schedule of four thousand tasks."""
    rest, module = "P(('data', 'model'), None)", "module_" * 8
    arguments = {
        f"state.params['{module}{chr(97 + n % 26)}{n}']['kernel']": (rest, f"float32[{n + 8},64] parameter")
        for n in range(4000)
    }
    ops = tuple(
        OpTime(f"forward {'scope/' * 20}dot_general #{n}", 1, 1e-3, 1e12, 1e9, 989e12) for n in range(16)
    )
    for plan in (one_program(arguments, profile=profile(ops)), pipeline(microbatches=512), pipeline(32, 64)):
        assert len(plan.report().encode()) < MAX_BYTES
    assert "smaller arguments left out" in one_program(arguments).report()


# --- the command


def test_the_command_writes_the_page_of_the_file(tmp_path, capsys):
    plan, page = one_program(), tmp_path / "plan.html"
    plan.save(tmp_path / "plan.json")
    assert cli.main(["report", str(tmp_path / "plan.json"), "-o", str(page)]) == 0
    assert page.read_text() == Plan.load(tmp_path / "plan.json").report()
    assert str(page) in capsys.readouterr().out
    assert (
        cli.main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "nowhere" / "plan.html")]) == 2
    )
    assert cli.main(["report", str(tmp_path / "none.json"), "-o", str(page)]) == 2


def test_workers_under_1f1b_hold_as_many_microbatches_as_are_in_flight():
    """Worker n of four holds 4 - n of them, each with 1 MiB of residuals, besides 1 GiB of state."""
    plan = pipeline(microbatches=8, stages=4)
    simulation = simulated(plan)
    stacks = [held(plan, simulation, worker) for worker in range(4)]
    assert [[max(slices) / 2**20 for slices in stack] for stack in stacks] == [
        [1024, 4 - n, 0] for n in range(4)
    ]
    state, residuals, _ = stacks[0]
    assert set(state) == {2.0**30}
    assert residuals[0] == 2**20
    assert sorted(residuals[:5]) == [*residuals[:5]]
    assert "Worker 0 holds most: 2 GiB a device. Its state takes 1 GiB" in Read(plan.report()).text
