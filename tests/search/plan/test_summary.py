"""What `print(plan)` says: every argument once, no more than the plan does, totals that add up."""

import re
from dataclasses import replace

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.gpu_targets import AS_PLANNED, scheduler_options
from autoshard.search.plan.peak_band import compiled
from autoshard.search.plan.plan import Collective, Estimates, Plan, Sharding
from autoshard.search.plan.summary import summary
from autoshard.search.plan.work_shares import WorkShares

SPLIT, WHOLE = "P(None, 'model')", "P()"

COLLECTIVES = (
    Collective("all-gather", ("model",), 24, 384 << 20, 1e-3),
    Collective("all-reduce", ("data", "model"), 63, 9 << 20, 2e-3),
    Collective("all-reduce", ("data",), 1, 4, 1e-3),
)


def make_plan(
    arguments, mesh=(("data", 2), ("model", 8)), ops=(), collectives=COLLECTIVES, cluster="16xH100-80GB"
):
    compute_s = 6e-3
    estimates = Estimates(
        step_s=compute_s + sum(c.seconds for c in collectives),
        compute_s=compute_s,
        recompute_s=0.0,
        transfer_s=0.0,
        hidden_s=0.0,
        peak_bytes=10 << 30,
        host_bytes=0,
        residents={"parameters": 3 << 30, "optimizer_state": 6 << 30, "temporaries": 1 << 30},
        peak_at="backward add_any (losses/classification.py:400)",
        collectives=collectives,
    )
    return Plan(
        step="train_step",
        fingerprint="0123456789abcdef",
        jax="0.12.0",
        cluster=parse_cluster(cluster).to_json(),
        options={},
        meshes=((16,), (2, 8)),
        memory_bytes=20 << 30,
        executor="jit",
        microbatches=1,
        retention={},
        shardings=(Sharding(dict(mesh), dict(arguments), dict(ops), {}),),
        estimates=estimates,
        gap=0.005,
    )


def tree(prefix, layers, kernel=SPLIT, bias=WHOLE):
    for i in range(layers):
        for name in ("query", "key", "value"):
            yield f"{prefix}['block_{i}']['attn']['{name}']['kernel']", kernel
            yield f"{prefix}['block_{i}']['attn']['{name}']['bias']", bias
    yield f"{prefix}['embed']['embedding']", "P('model')"


def gpt(layers=4, **mu):
    return [
        *tree("state.params", layers),
        *tree("state.opt_state[0].mu", layers, **mu),
        *tree("state.opt_state[0].nu", layers, **mu),
        ("state.step", WHOLE),
        ("batch['tokens']", "P('data')"),
    ]


def argument_counts(text):
    """The counts of the argument lines."""
    section = text[text.index("arguments (") : text.index("collectives per step")]
    lines = re.findall(r"P\(.*\)  +(\d+)x  ", section)
    return [int(n) for n in lines], [int(n) for n in re.findall(r"and (\d+) more array", section)]


def test_repeated_layers_and_names_fold_into_one_line():
    assert re.search(
        r"P\(None, 'model'\) +12x  \['block_\*'\]\['attn'\]\['query'\|'key'\|'value'\]\['kernel'\]",
        summary(make_plan(gpt())),
    )


def test_optimizer_state_that_follows_its_parameters_is_named_once():
    text = summary(make_plan(gpt()))
    assert "state.params (25); 50 sharded alike in state.opt_state[0].mu, state.opt_state[0].nu" in text
    assert text.count("['kernel']") == 1


def test_optimizer_state_that_lies_otherwise_is_listed():
    text = summary(make_plan(gpt(bias="P('data')")))
    assert "state.params (25); 26 sharded alike in state.opt_state[0].mu, state.opt_state[0].nu" in text
    assert "state.opt_state[0].mu, state.opt_state[0].nu (24, sharded differently)" in text
    assert re.search(r"P\('data'\) +24x  \['block_\*'\]\['attn'\]\['query'\|'key'\|'value'\]\['bias'\]", text)


def test_layers_that_lie_otherwise_are_told_apart():
    arguments = dict(tree("params", 8))
    for i in (0, 1, 2, 5):
        arguments[f"params['block_{i}']['attn']['key']['kernel']"] = "P('data')"
    text = summary(make_plan(arguments))
    assert re.search(r"P\('data'\) +4x  params\['block_0-2,5'\]\['attn'\]\['key'\]\['kernel'\]", text)
    assert re.search(
        r"P\(None, 'model'\) +4x  params\['block_3-4,6-7'\]\['attn'\]\['key'\]\['kernel'\]", text
    )


def test_a_line_is_a_full_product():
    arguments = {"p['a'][0]": SPLIT, "p['b'][1]": SPLIT, "p['a'][1]": "P('data')", "p['b'][0]": "P('data')"}
    text = summary(make_plan(arguments))
    assert argument_counts(text)[0] == [1, 1, 1, 1]
    assert "*" not in text[text.index("arguments") : text.index("collectives")]


@pytest.mark.parametrize("layers", [1, 2, 40])
def test_every_argument_is_counted_once(layers):
    arguments = dict(gpt(layers))
    model, alike = len(dict(tree("", layers))), 2 * len(dict(tree("", layers)))
    counts, more = argument_counts(summary(make_plan(arguments)))
    assert sum(counts) + sum(more) == len(arguments) - alike == model + 2


def test_a_thousand_unlike_arguments_stay_short():
    arguments = {f"params['{'x' * (i + 1)}'][{i}].w": SPLIT if i % 2 else "P('data')" for i in range(1000)}
    arguments |= {f"params['deep']{'[0]' * i}": SPLIT for i in range(1, 30)}
    text = summary(make_plan(arguments))
    counts, more = argument_counts(text)
    assert len(text.splitlines()) < 50
    assert sum(counts) + sum(more) == len(arguments)
    assert max(map(len, text.splitlines())) < 160


def test_the_mesh_says_what_lies_inside_a_node():
    text = summary(make_plan(gpt()))
    assert "mesh      data=2 x model=8: data across nodes (50 GB/s), model inside a node (450 GB/s)" in text
    assert "cluster   16xH100-80GB: 2 nodes of 8 H100-80GB" in text


def test_what_the_compiler_is_told_is_said_where_there_is_one_for_gpus():
    plan = make_plan(gpt())
    (said,) = re.findall(r"^compiler +(.*)$", summary(plan), re.MULTILINE)
    wanted = scheduler_options(plan.cluster["device"]["name"]) | AS_PLANNED
    assert said.split(", ") == [f"{option}={value}" for option, value in wanted.items()]
    simulated = {**plan.cluster, "device": {**plan.cluster["device"], "name": "CPU"}}
    assert "compiler" not in summary(replace(plan, cluster=simulated))


def test_times_and_bytes_add_up():
    text = summary(make_plan(gpt()))
    assert re.search(r"total +88x +393 MiB +4 ms", text)
    assert "predicted step time: 10 ms" in text
    assert [int(n) for n in re.findall(r"(?:computation|all-gather|all-reduce) +\d+ ms +(\d+)%", text)] == [
        60,
        10,
        30,
    ]
    assert "predicted peak memory: 10 GiB of 20 GiB per device (50%)" in text
    shares = text[text.index("memory at the peak") : text.index("the gap is certified")]
    assert sum(int(n) for n in re.findall(r"GiB +(\d+)%", shares)) == 100


@pytest.mark.parametrize(
    ("peak_gib", "said"),
    [
        (10, "predicted peak memory: 10 GiB of 20 GiB per device (50%), not compiled: 7.9 GiB to 13.6 GiB"),
        (
            18,
            "predicted peak memory: 18 GiB of 20 GiB per device (90%), not compiled: 14.2 GiB to 24.5 GiB; it may not fit",
        ),
        (
            22,
            "predicted peak memory: 22 GiB of 20 GiB per device (110%), not compiled: 17.4 GiB to 29.9 GiB; by "
            "prediction it does not fit",
        ),
    ],
)
def test_a_predicted_peak_has_its_error_band(peak_gib, said):
    plan = make_plan(gpt())
    plan = replace(plan, estimates=replace(plan.estimates, peak_bytes=peak_gib << 30))
    assert said in summary(plan).splitlines()


def test_a_compiled_peak_has_none():
    plan = compiled(make_plan(gpt()), 12 << 30)
    said = "peak memory: 12 GiB (compiled) of 20 GiB per device (60%), 10 GiB predicted"
    assert said in summary(plan).splitlines()


def test_nothing_is_known_of_the_error_on_simulated_devices():
    text = summary(make_plan(gpt(), cluster="16xCPU"))
    assert "predicted peak memory: 10 GiB of 20 GiB per device (50%)" in text.splitlines()


def test_hidden_communication_is_shown():
    plan = make_plan(gpt())
    plan = replace(plan, estimates=replace(plan.estimates, step_s=8e-3, hidden_s=2e-3))
    assert re.search(r"hidden behind computation +-2 ms", summary(plan))


def test_products_and_lookups_are_shown_by_layer_with_their_runs():
    ops = {
        "forward attn/dot_general": "A",
        "forward attn/dot_general #2": "A",
        "backward gather": "B",
        "forward add": "C",
    }
    plan = make_plan(gpt(), ops=ops)
    shares = WorkShares(runs={"forward attn/dot_general": 12})
    text = summary(replace(plan, estimates=replace(plan.estimates, shares=(shares,))))
    assert section(text, "matrix products", 4) == [
        "matrix products and lookups, forward phase (1 kind in other phases)",
        "  attn/dot_general     12x  A",
        "  attn/dot_general #2       A",
        "collectives per step (bytes per device)",
    ]


def test_the_gap_and_the_search_time_are_told():
    plan = make_plan(gpt())
    plan = replace(plan, estimates=replace(plan.estimates, step_s=6e-3, hidden_s=9e-4))
    assert "within 0.5% of the fastest plan of its search space\n" in summary(plan)
    assert section(summary(plan), "the gap is certified", 3) == [
        "the gap is certified among plans that",
        "  need at most 20 GiB in program order",
        "  are on mesh 16, 2x8",
    ]
    assert "it is the fastest plan of its search space" in summary(replace(plan, gap=1e-14))
    assert "none, as these decisions were edited" in summary(replace(plan, gap=None))
    assert "search time" not in summary(plan)
    assert "search time: 3 s (graph 1 s, solve 2 s)" in summary(
        replace(plan, search_s={"graph": 1.0, "solve": 2.0})
    )


@pytest.mark.parametrize(
    ("gap", "said"), [(0.0050001, "0.51%"), (0.1234, "13%"), (1.0, "100%"), (0.00999, "1%")]
)
def test_a_certified_gap_is_never_rounded_down(gap, said):
    assert f"within {said} of" in summary(replace(make_plan(gpt()), gap=gap))


def test_plain_text_the_same_each_time():
    plan = make_plan(gpt())
    assert summary(plan) == str(plan)
    assert str(plan).isascii()
    assert all(line.isprintable() and line == line.rstrip() for line in str(plan).splitlines())


def test_one_argument_and_no_collective():
    text = summary(make_plan({"w": WHOLE}, mesh=(("data", 1),), collectives=(), cluster="1xH100-80GB"))
    assert "arguments (1 array)\n  P()  1x  w\n" in text
    assert "collectives per step: none" in text
    assert "mesh      data=1\n" in text
    assert text.startswith("one device\n")


def test_a_plan_whose_cluster_makes_no_sense_is_refused():
    plan = make_plan(gpt())
    with pytest.raises(PlanError, match="plan: cluster"):
        summary(replace(plan, cluster={**plan.cluster, "num_devices": -1}))
    with pytest.raises(PlanError, match="at most 8 devices"):
        summary(replace(plan, cluster=parse_cluster("8xH100-80GB").to_json()))


def test_what_is_recomputed_is_shown_by_its_heavy_ops():
    plan = make_plan(gpt())
    assert "recomputed" not in summary(plan)
    retention = {
        "forward block_*/attn/dot_general": "remat 0-11 of 24",
        "forward block_*/attn/exp": "remat 0-11 of 24",
        "forward block_*/attn/sub": "remat",
    }
    estimates = replace(plan.estimates, recompute_s=1e-3)
    text = summary(replace(plan, retention=retention, estimates=estimates))
    assert "recomputed in the backward phase (2 kinds of cheap ops not listed)" in text
    assert re.search(r"\n  block_\*/attn/dot_general  remat 0-11 of 24\n", text)
    assert "exp" not in text
    assert re.search(r"incl. recomputation +1 ms +10%", text)


# --- whole sections, so that columns stand as they should


def section(text, first, num_lines):
    lines = text.splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(first)]
    return lines[start : start + num_lines]


def test_collectives_by_their_time_and_their_total():
    assert section(summary(make_plan(gpt())), "collectives", 6) == [
        "collectives per step (bytes per device)",
        "  all-reduce  over data, model  63x    9 MiB  2 ms",
        "  all-gather  over model        24x  384 MiB  1 ms",
        "  all-reduce  over data          1x      4 B  1 ms",
        "  total                         88x  393 MiB  4 ms",
        "time per step",
    ]
    alone = summary(make_plan(gpt(), collectives=COLLECTIVES[:1]))
    assert section(alone, "collectives", 3)[1:] == [
        "  all-gather  over model  24x  384 MiB  1 ms",
        "time per step",
    ]


def test_the_parts_of_time_as_shares_of_the_step():
    plan = make_plan(gpt())
    estimates = replace(plan.estimates, step_s=9e-3, hidden_s=1e-3, recompute_s=2e-5)
    assert section(summary(replace(plan, estimates=estimates)), "time per step", 6) == [
        "time per step",
        "  computation                 6 ms   67%",
        "  incl. recomputation        20 us   <1%",
        "  all-gather                  1 ms   11%",
        "  all-reduce                  3 ms   33%",
        "  hidden behind computation  -1 ms  -11%",
    ]
    hardly = summary(replace(plan, estimates=replace(estimates, hidden_s=1e-9, recompute_s=6e-5)))
    assert "hidden" not in hardly
    assert re.search(r"incl. recomputation +60 us +1%", hardly)


def test_memory_largest_first_and_what_is_on_the_host():
    plan = make_plan(gpt())
    on_host = replace(plan, estimates=replace(plan.estimates, host_bytes=3 << 30))
    wanted = [
        "memory at the peak, per device",
        "  optimizer state  6 GiB  60%",
        "  parameters       3 GiB  30%",
        "  temporaries      1 GiB  10%",
        "  at backward add_any (losses/classification.py:400)",
    ]
    assert section(summary(on_host), "memory at", 6) == [*wanted, "  on the host: 3 GiB per device"]
    assert section(summary(plan), "memory at", 5) == wanted
    assert "host" not in summary(plan)


def test_the_options_that_were_given():
    plan = make_plan(gpt())
    assert "given" not in summary(plan)
    given = summary(replace(plan, options={"memory": "20GiB", "mesh": [2, 8]}))
    assert section(given, "given", 1) == ["given     memory 20GiB, mesh [2, 8]"]


def test_an_axis_of_one_device_lies_nowhere():
    text = summary(make_plan(gpt(), mesh=(("data", 1), ("model", 8)), cluster="8xH100-80GB"))
    assert section(text, "mesh", 1) == ["mesh      data=1 x model=8: model inside a node (450 GB/s)"]


def test_of_many_kinds_the_first_are_shown_and_the_rest_counted():
    names = [f"forward {n}/dot_general" for n in "abcdefghij"]
    plan = make_plan(gpt(), ops=dict(zip(names, "0123456789", strict=True)))
    text = summary(replace(plan, retention=dict.fromkeys(names, "remat")))
    assert section(text, "matrix products", 10) == [
        "matrix products and lookups, forward phase",
        *(f"  {name}/dot_general    {n}" for n, name in enumerate("abcdefgh")),
        "  ... and 2 more kinds",
    ]
    assert section(text, "recomputed", 10) == [
        "recomputed in the backward phase",
        *(f"  {name}/dot_general  remat" for name in "abcdefgh"),
        "  ... and 2 more kinds",
    ]


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_a_summary_fits_the_terminal_and_says_the_same(monkeypatch, columns):
    wide = summary(make_plan(gpt(bias="P('data')")))
    monkeypatch.setenv("COLUMNS", str(columns))
    text = summary(make_plan(gpt(bias="P('data')")))
    assert max(map(len, wide.splitlines())) > 80
    assert max(map(len, text.splitlines())) <= columns
    assert "".join(text.split()) == "".join(wide.split())
