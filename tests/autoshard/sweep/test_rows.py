"""Rows of a sweep: prices, the Pareto front, and what is printed and drawn of them."""

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.units import format_bytes
from autoshard.search.plan.outline import Outline
from autoshard.sweep.chart import page
from autoshard.sweep.rows import WhatIf, check_prices, cost, steps_for, with_front
from autoshard.sweep.table import table
from tests.search.plan.test_summary import gpt, make_plan


@cache
def planned(cluster):
    return make_plan(gpt(), cluster=cluster)


def plan(step_s=0.01, cluster="16xH100-80GB"):
    found = planned(cluster)
    return replace(found, estimates=replace(found.estimates, step_s=step_s))


def row(step_s, price=None, cluster="16xH100-80GB"):
    return WhatIf(cluster=cluster, memory_bytes=20 << 30, plan=plan(step_s), steps=1000, cost=price)


MISFIT = WhatIf(cluster="8xL4", memory_bytes=1 << 30, plan=None, reason="nothing <fits> 1 GiB a device")


def test_gpu_hours_are_steps_times_devices():
    """16 devices for 1,000 steps of 0.9 s are four hours."""
    one = row(0.9)
    assert one.time_s == pytest.approx(900)
    assert one.gpu_hours == one.price == pytest.approx(4)
    assert MISFIT.gpu_hours is MISFIT.step_s is MISFIT.peak_bytes is None


def test_the_peak_is_the_compiled_one_if_there_is_one():
    assert row(1).peak_bytes == 10 << 30
    compiled = plan()
    compiled = replace(compiled, estimates=replace(compiled.estimates, compiled_peak_bytes=12 << 30))
    assert replace(row(1), plan=compiled).peak_bytes == 12 << 30


def test_a_cost_is_hours_times_the_price_of_each_gpu():
    assert cost(plan(3.6), 1000, {"h100": 2.5}) == pytest.approx(16 * 2.5)
    assert cost(plan(3.6), 1000, {"h100": 2.5, "H100-80GB": 1.0}) == pytest.approx(16)
    assert cost(plan(3.6), 1000, {"l4": 2.5}) is None
    mixed = replace(plan(3.6), cluster=parse_hardware("8xH100-80GB+16xL4").to_json())
    assert cost(mixed, 1000, {"h100": 2, "l4": 1}) == pytest.approx(8 * 2 + 16)
    assert cost(mixed, 1000, {"h100": 2}) is None


def test_a_price_is_for_a_gpu_of_the_sweep():
    clusters = [parse_hardware("8xH100-80GB+16xL4"), parse_hardware("8xL40S")]
    check_prices({"h100": 2.5, "l4": 0, "L40S": 1}, clusters)
    with pytest.raises(InputError, match="there is a price for 'h200', and GPUs are H100-80GB, L4, L40S"):
        check_prices({"h200": 1}, clusters)
    with pytest.raises(InputError, match="wanted a price per GPU hour"):
        check_prices({"l4": -1}, clusters)


def test_steps_of_tokens_are_rounded_up():
    tokens = Outline({"ids": "int32[4,8] batch"}, {}, {})
    assert steps_for(65, replace(plan(), outline=tokens)) == 3
    with pytest.raises(InputError, match=r"give steps= \(--steps\)"):
        steps_for(65, plan())


points = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6)


@given(points)
def test_the_front_is_what_nothing_beats(points):
    """By its definition: a point is beaten by one that is as good in both, and better in one."""
    rows = with_front([row(time, price) for time, price in points] + [MISFIT])
    marked = [one.is_on_front for one in rows]
    beaten = {p for p, q in product(points, points) if q != p and q[0] <= p[0] and q[1] <= p[1]}
    assert marked == [*(p not in beaten for p in points), False]


def test_the_table_has_all_rows():
    rows = with_front([row(0.9, 100.0), row(1.8, 50.5, "8xL4"), row(2.0, 200.0), MISFIT])
    lines = table(rows).splitlines()
    assert lines[0] == "cost of 1000 steps; * no other is as fast and as cheap"
    assert lines[1].split() == ["cluster", "cap", "step", "peak", "GPU", "hours", "cost"]
    assert [line.split()[0] for line in lines[2:5]] == ["*", "*", "16xH100-80GB"]
    assert "50.50" in lines[3]
    assert lines[5:] == ["no plan for", "  8xL4  1 GiB  nothing <fits> 1 GiB a device"]


def test_nothing_that_fits_is_a_list_of_reasons():
    assert table([MISFIT]).splitlines()[0] == "no plan for"


class Page(HTMLParser):
    """What is in a file, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_plot_has_a_point_for_each_plan_and_loads_nothing():
    found = Page(page("train.py:<target>", with_front([row(0.9, 100.0), row(1.8, 50.0), MISFIT])))
    assert found.tags.count("circle") == 2
    assert found.tags.count("polyline") == 1
    assert found.tags.count("tr") == 4
    assert found.loads == []
    assert {"script", "link", "img"}.isdisjoint(found.tags)
    assert "nothing <fits> 1 GiB a device" in found.words
    assert "Which cluster for train.py:<target>?" in found.words


def test_a_point_names_its_cap_only_if_other_caps_of_its_cluster_lie_elsewhere():
    same, elsewhere = replace(row(0.9), memory_bytes=2 << 30), replace(row(1.8), memory_bytes=4 << 30)
    caps = [row(0.9).memory_bytes, 2 << 30]
    assert not any("GiB)" in word for word in Page(page("step", [row(0.9), same])).words)
    named = {word for word in Page(page("step", [row(0.9), same, elsewhere])).words if "GiB)" in word}
    assert named == {f"16xH100-80GB ({', '.join(map(format_bytes, caps))})", "16xH100-80GB (4 GiB)"}


def test_a_plot_of_one_point_and_one_of_none():
    assert Page(page("step", with_front([row(0.9)]))).tags.count("circle") == 1
    assert "svg" not in Page(page("step", [MISFIT])).tags


def test_a_row_as_json():
    said = with_front([row(0.9, 100.0)])[0].to_json()
    assert {key: said[key] for key in ("cluster", "fits", "steps", "cost", "is_on_front")} == {
        "cluster": "16xH100-80GB",
        "fits": True,
        "steps": 1000,
        "cost": 100.0,
        "is_on_front": True,
    }
    assert MISFIT.to_json()["reason"] == MISFIT.reason
