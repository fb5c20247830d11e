"""Excerpts of what XLA:GPU printed (JAX 0.12, compiled for H100s), less metadata; the answers are worked out by hand."""
# ruff: noqa: E501 (one instruction a line, as XLA prints them)

import pytest

from autoshard.cost_model.xla.hlo import (
    FROM_HOST,
    TO_HOST,
    HloCollective,
    HostCopy,
    collectives,
    host_copies,
    totals,
)

ADD = """\
%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}
"""

MLP = f"""\
HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[512]{{0}})->f32[512]{{0}}}}, num_partitions=8

{ADD}
ENTRY %main.9_spmd (param.6: f32[512], param.7: f32[1024,512]) -> f32[4096,512] {{
  %param.6 = f32[512]{{0}} parameter(0), sharding={{devices=[8]<=[8]}}
  %param.7 = f32[1024,512]{{1,0}} parameter(1)
  %collective-permute-start = ((f32[512]{{0}}), f32[512]{{0}}) collective-permute-start(%param.6), channel_id=3, source_target_pairs={{{{0,0}},{{1,4}},{{2,1}},{{3,5}},{{4,2}},{{5,6}},{{6,3}},{{7,7}}}}, metadata={{op_name="jit(step)/sharding_constraint"}}
  %wrapped_transpose = f32[512,1024]{{1,0}} fusion(%param.7), kind=kInput, calls=%wrapped_transpose_computation
  %collective-permute-done = f32[512]{{0}} collective-permute-done(%collective-permute-start)
  %all-gather-start.2 = ((f32[512]{{0}}, f32[512,1024]{{1,0}}), (f32[1024]{{0}}, f32[1024,1024]{{1,0}})) all-gather-start(%collective-permute-done, %wrapped_transpose), channel_id=4, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}, use_global_device_ids=true
  %all-gather-done.2 = (f32[1024]{{0}}, f32[1024,1024]{{1,0}}) all-gather-done(%all-gather-start.2)
  %get-tuple-element.46 = f32[1024,1024]{{1,0}} get-tuple-element(%all-gather-done.2), index=1
  %custom-call.8 = (f32[4096,1024]{{1,0}}, s8[4194304]{{0}}) custom-call(%get-tuple-element.46), custom_call_target="__cublas$lt$matmul"
  %get-tuple-element.26.0 = f32[4096,1024]{{1,0}} get-tuple-element(%custom-call.8), index=0
  %reduce-scatter.8 = f32[2048,1024]{{1,0}} reduce-scatter(%get-tuple-element.26.0), channel_id=14, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, dimensions={{0}}, to_apply=%add.clone, metadata={{op_name="jit(step)/jvp()/dot_general"}}
  %all-reduce.1.2 = f32[2048,1024]{{1,0}} all-reduce(%reduce-scatter.8), channel_id=6, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add.clone
  %wrapped_concatenate = f32[1025]{{0}} fusion(%all-reduce.1.2), kind=kLoop, calls=%wrapped_concatenate_computation
  %all-reduce-start.1 = ((f32[1025]{{0}}), f32[1025]{{0}}) all-reduce-start(%wrapped_concatenate), channel_id=11, replica_groups=mesh['axis_0'=2,'axis_1'=4] {{'axis_0'}}, use_global_device_ids=true, to_apply=%add.clone, output_to_operand_aliasing={{{{1}}: (0, {{}})}}
  %all-reduce-done.1 = f32[1025]{{0}} all-reduce-done(%all-reduce-start.1)
  %get-tuple-element.29.0 = f32[4096,2048]{{0,1}} get-tuple-element(%custom-call.8), index=0
  %reduce-scatter-start.1 = ((f32[4096,2048]{{0,1}}), f32[4096,512]{{0,1}}) reduce-scatter-start(%get-tuple-element.29.0), channel_id=15, replica_groups=mesh['data'=2,'model'=4] {{'model'}}, use_global_device_ids=true, dimensions={{1}}, to_apply=%add.clone
  %bitcast.106.0 = f32[1024,8,64]{{2,0,1}} bitcast(%get-tuple-element.29.0)
  %all-to-all.5 = f32[1024,8,64]{{2,0,1}} all-to-all(%bitcast.106.0), channel_id=3, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{1}}
  ROOT %reduce-scatter-done.1 = f32[4096,512]{{0,1}} reduce-scatter-done(%reduce-scatter-start.1)
}}
"""


def test_every_form_of_collective_is_read_once():
    found = collectives(MLP, {"data": 2, "model": 4})
    assert [(c.kind, c.axes, c.num_operands, c.num_bytes) for c in found] == [
        ("collective-permute", ("data", "model"), 1, 4 * 512),
        ("all-gather", ("data",), 2, 4 * (1024 + 1024 * 1024)),
        ("reduce-scatter", ("data",), 1, 4 * 4096 * 1024),
        ("all-reduce", ("model",), 1, 4 * 2048 * 1024),
        ("all-reduce", ("data",), 1, 4 * 1025),
        ("reduce-scatter", ("model",), 1, 4 * 4096 * 2048),
        ("all-to-all", ("data", "model"), 1, 4 * 1024 * 8 * 64),
    ]
    assert found[2] == HloCollective("reduce-scatter", ("data",), 1, 16777216, 1)


def test_totals_are_by_kind_and_axes():
    found = totals(collectives(MLP, {"data": 2, "model": 4}))
    assert list(found) == sorted(found)
    assert found["all-gather", ("data",)] == (2, 4 * (1024 + 1024 * 1024))


LOOP = f"""\
HloModule jit_step, is_scheduled=true

{ADD}
%wrapped_reduce_scatter (param_0: bf16[512,2048]) -> bf16[64,2048] {{
  %param_0 = bf16[512,2048]{{1,0}} parameter(0)
  ROOT %reduce-scatter.3 = bf16[64,2048]{{1,0}} reduce-scatter(%param_0), channel_id=2, replica_groups={{}}, dimensions={{0}}, to_apply=%add.clone
}}

%inner (param.1: (s32[], bf16[64,2048])) -> (s32[], bf16[64,2048]) {{
  %param.1 = (s32[], bf16[64,2048]{{1,0}}) parameter(0)
  %get-tuple-element.1 = bf16[64,2048]{{1,0}} get-tuple-element(%param.1), index=1
  %all-gather.1 = bf16[512,2048]{{1,0}} all-gather(%get-tuple-element.1), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}
  %reduce-scatter-start = ((bf16[512,2048]{{1,0}}), bf16[64,2048]{{1,0}}) async-start(%all-gather.1), calls=%wrapped_reduce_scatter
  %reduce-scatter-done = bf16[64,2048]{{1,0}} async-done(%reduce-scatter-start), calls=%wrapped_reduce_scatter
  ROOT %tuple.1 = (s32[], bf16[64,2048]{{1,0}}) tuple(%reduce-scatter-done)
}}

%outer (param.2: (s32[], /*index=1*/bf16[64,2048])) -> (s32[], bf16[64,2048]) {{
  %param.2 = (s32[], bf16[64,2048]{{1,0}}) parameter(0)
  ROOT %while.1 = (s32[], /*index=1*/bf16[64,2048]{{1,0}}) while(%param.2), condition=%less, body=%inner, metadata={{op_name="jit(step)/while"}}, backend_config={{"known_trip_count":{{"n":"4"}},"known_init_step":{{"init":"0","step":"1"}}}}
}}

%unused (param.4: bf16[8]) -> bf16[8] {{
  %param.4 = bf16[8]{{0}} parameter(0)
  ROOT %all-reduce.9 = bf16[8]{{0}} all-reduce(%param.4), channel_id=9, replica_groups={{}}, to_apply=%add.clone
}}

ENTRY %main (param.3: (s32[], bf16[64,2048])) -> (s32[], bf16[64,2048]) {{
  %param.3 = (s32[], bf16[64,2048]{{1,0}}) parameter(0)
  ROOT %while.2 = (s32[], bf16[64,2048]{{1,0}}) while(%param.3), condition=%less, body=%outer, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


def test_a_collective_counts_as_often_as_its_loops_run():
    found = collectives(LOOP, {"data": 8})
    assert [(c.kind, c.count, c.num_bytes) for c in found] == [
        ("reduce-scatter", 12, 2 * 512 * 2048),
        ("all-gather", 12, 2 * 512 * 2048),
    ]
    assert totals(found)["all-gather", ("data",)] == (12, 12 * 2 * 512 * 2048)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("replica",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("data",)),
        ("replica_groups={}", ("replica", "data", "model")),
        ("replica_groups=[4,2]<=[8]", ("model",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("replica",)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("replica", "model")),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("data", "model")),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2,'a'}", ("replica", "model")),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([0,4,1,5,2,6,3,7]) {'b'}", ("replica",)),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("model",)),
    ],
)
def test_groups_are_named_by_the_axes_along_which_they_differ(groups, axes):
    kind = "collective-permute" if groups.startswith("source") else "all-to-all"
    text = (
        "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        f"  ROOT %c = f32[8]{{0}} {kind}(%p), {groups}\n}}\n"
    )
    (found,) = collectives(text, {"replica": 2, "data": 2, "model": 2})
    assert (found.axes, found.num_bytes) == (axes, 32)


def test_a_permute_in_place_is_none():
    pairs = "source_target_pairs={{4,4},{0,0},{1,1},{5,5},{2,2},{6,6},{3,3},{7,7}}"
    text = (
        f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  ROOT %c = f32[8]{{0}} collective-permute(%p), {pairs}\n}}\n"
    )
    assert collectives(text, {"data": 2, "model": 4}) == ()


def test_packed_and_odd_types_have_their_size():
    text = (
        "ENTRY %main (p: s4[7], q: pred[3], r: f8e4m3fn[5]) -> s4[7] {\n  %p = s4[7]{0:E(4)} parameter(0)\n"
        "  %q = pred[3]{0} parameter(1)\n  %r = f8e4m3fn[5]{0:S(5)} parameter(2)\n"
        "  ROOT %c = (s4[7]{0}, pred[3]{0}, f8e4m3fn[5]{0}) collective-broadcast(%p, %q, %r), replica_groups={}\n}\n"
    )
    (found,) = collectives(text, {"data": 8})
    assert (found.num_operands, found.num_bytes) == (3, 4 + 3 + 5)


OFFLOADED = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main.9_spmd (param.1: f32[8192,4096], param.2: f32[4096,4096]) -> f32[8192,4096] {
  %param.1 = f32[8192,4096]{1,0} parameter(0)
  %copy-start.6 = (f32[8192,4096]{1,0:S(5)}, f32[8192,4096]{1,0}, u32[]) copy-start(%param.1), backend_config={"operation_queue_id":"5"}
  %copy.26 = f32[8192,4096]{0,1} copy(%param.1)
  %copy-done.6 = f32[8192,4096]{1,0:S(5)} copy-done(%copy-start.6), metadata={op_name="jit(step)/optimization_barrier"}
  %copy-start.3.0 = (f32[8192,4096]{1,0}, f32[8192,4096]{1,0:S(5)}, u32[]) copy-start(%copy-done.6)
  ROOT %copy-done.3.0 = f32[8192,4096]{1,0} copy-done(%copy-start.3.0)
}
"""

STACKED = """\
HloModule jit_scan_step, is_scheduled=true, num_partitions=8

%wrapped_dynamic-update-slice_computation (param_0.14: f32[4,8192,4096], param_1.13: f32[1,8192,4096], param_2.7: s32[]) -> f32[4,8192,4096] {
  %param_0.14 = f32[4,8192,4096]{2,1,0:S(5)} parameter(0)
  %param_1.13 = f32[1,8192,4096]{2,1,0} parameter(1)
  %param_2.7 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1.1 = f32[4,8192,4096]{2,1,0:S(5)} dynamic-update-slice(%param_0.14, %param_1.13, %param_2.7, %param_2.7, %param_2.7)
}

%region_0.1_spmd (param: (s32[], f32[8192,4096], f32[4,8192,4096])) -> (s32[], f32[8192,4096], f32[4,8192,4096]) {
  %param = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) parameter(0)
  %get-tuple-element.65 = s32[] get-tuple-element(%param), index=0
  %get-tuple-element.66 = f32[8192,4096]{1,0} get-tuple-element(%param), index=1
  %bitcast.1.0 = f32[1,8192,4096]{2,1,0} bitcast(%get-tuple-element.66)
  %get-tuple-element.67 = f32[4,8192,4096]{2,1,0:S(5)} get-tuple-element(%param), index=2
  %dynamic-update-slice-start.1 = ((f32[4,8192,4096]{2,1,0:S(5)}, f32[1,8192,4096]{2,1,0}, s32[]), f32[4,8192,4096]{2,1,0:S(5)}, u32[]) fusion-start(%get-tuple-element.67, %bitcast.1.0, %get-tuple-element.65), kind=kLoop, calls=%wrapped_dynamic-update-slice_computation
  %dynamic-update-slice-done.1 = f32[4,8192,4096]{2,1,0:S(5)} fusion-done(%dynamic-update-slice-start.1)
  ROOT %tuple.12 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) tuple(%get-tuple-element.65, %get-tuple-element.66, %dynamic-update-slice-done.1)
}

%region_2.3_spmd (param.2: (s32[], f32[8192,4096], f32[4,8192,4096])) -> (s32[], f32[8192,4096], f32[4,8192,4096]) {
  %param.2 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) parameter(0)
  %get-tuple-element.78 = s32[] get-tuple-element(%param.2), index=0
  %get-tuple-element.87 = f32[4,8192,4096]{2,1,0:S(5)} get-tuple-element(%param.2), index=2
  %dynamic-slice-start.1 = ((f32[4,8192,4096]{2,1,0:S(5)}, s32[]), f32[1,8192,4096]{2,1,0}, u32[]) fusion-start(%get-tuple-element.87, %get-tuple-element.78), kind=kLoop, calls=%wrapped_dynamic-slice_computation
  %dynamic-slice-done.1 = f32[1,8192,4096]{2,1,0} fusion-done(%dynamic-slice-start.1)
  %bitcast.3.0 = f32[8192,4096]{1,0} bitcast(%dynamic-slice-done.1)
  ROOT %tuple.15 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) tuple(%get-tuple-element.78, %bitcast.3.0, %get-tuple-element.87)
}

ENTRY %main (param.4: (s32[], f32[8192,4096])) -> (s32[], f32[8192,4096], f32[4,8192,4096]) {
  %custom-call.12 = f32[4,8192,4096]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %tuple.10 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) tuple(%copy.4, %copy.27, %custom-call.12)
  %while.20 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) while(%tuple.10), condition=%region_1.2_spmd, body=%region_0.1_spmd, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %while.21 = (s32[], f32[8192,4096]{1,0}, f32[4,8192,4096]{2,1,0:S(5)}) while(%while.20), condition=%region_3.4_spmd, body=%region_2.3_spmd, backend_config={"known_trip_count":{"n":"4"}}
}
"""


@pytest.mark.parametrize(("text", "count"), [(OFFLOADED, 1), (STACKED, 4)])
def test_what_goes_to_the_host_and_comes_back(text, count):
    num_bytes = 4 * 8192 * 4096
    assert host_copies(text) == (HostCopy(TO_HOST, num_bytes, count), HostCopy(FROM_HOST, num_bytes, count))


CALLED = """\
ENTRY %main (p: f32[128,1024], m: f32[128,1024]) -> (f32[128,1024], f32[128,1024]) {
  %p = f32[128,1024]{1,0} parameter(0)
  %m = f32[128,1024]{1,0:S(5)} parameter(1)
  %c = f32[]{:S(5)} parameter(2)
  %call-start.1 = ((f32[128,1024]{1,0}, f32[128,1024]{1,0:S(5)}, f32[]{:S(5)}), (f32[128,1024]{1,0}, f32[128,1024]{1,0:S(5)}), u32[]) custom-call-start(%p, %m, /*index=2*/%c), async_execution_thread="host", custom_call_target="HostExecute", called_computations={%called}
  %call-done.1 = (f32[128,1024]{1,0}, f32[128,1024]{1,0:S(5)}) custom-call-done(%call-start.1)
  %new = f32[128,1024]{1,0} get-tuple-element(%call-done.1), index=0
  ROOT %tuple = (f32[128,1024]{1,0}) tuple(%new)
}
"""


def test_a_call_to_the_host_copies_what_is_on_the_device():
    num_bytes = 4 * 128 * 1024
    assert host_copies(CALLED) == (HostCopy(TO_HOST, num_bytes, 1), HostCopy(FROM_HOST, num_bytes, 1))


def test_a_plain_copy_to_the_host_counts_and_one_on_the_device_does_not():
    text = (
        "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n  %here = f32[8]{0} copy(%p)\n"
        "  %there = f32[8]{0:S(5)} copy(%here)\n  ROOT %still = f32[8]{0:S(5)} copy(%there)\n}\n"
    )
    assert host_copies(text) == (HostCopy(TO_HOST, 32, 1),)
