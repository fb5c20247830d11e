"""An excerpt in the form in which XLA:GPU prints schedules (JAX 0.12, H100s), less metadata; the answers are worked out by hand."""
# ruff: noqa: E501 (one instruction a line, as XLA prints them)

from autoshard.cost_model.compute import Product
from autoshard.cost_model.xla.hlo import HloCollective
from benchmarks.compiled_schedule import End, HloKernel, Loop, Start, schedule

DOT = '"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["{}"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}}'

STEP = f"""\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%fused_slice (param_0: f32[4,512,64], param_1: s32[]) -> f32[512,64] {{
  %param_0 = f32[4,512,64]{{2,1,0}} parameter(0)
  %param_1 = s32[] parameter(1)
  %slice = f32[1,512,64]{{2,1,0}} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={{1,512,64}}
  ROOT %bitcast = f32[512,64]{{1,0}} bitcast(%slice)
}}

%fused_update (param_0: f32[4,64], param_1: f32[64], param_2: s32[]) -> f32[4,64] {{
  %param_0 = f32[4,64]{{1,0}} parameter(0)
  %param_1 = f32[64]{{0}} parameter(1)
  %param_2 = s32[] parameter(2)
  %row = f32[1,64]{{1,0}} bitcast(%param_1)
  ROOT %update = f32[4,64]{{1,0}} dynamic-update-slice(%param_0, %row, %param_2)
}}

%body (p: (s32[], f32[4,512,64], f32[4,64])) -> (s32[], f32[4,512,64], f32[4,64]) {{
  %p = (s32[], f32[4,512,64]{{2,1,0}}, f32[4,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[4,512,64]{{2,1,0}} get-tuple-element(%p), index=1
  %sums = f32[4,64]{{1,0}} get-tuple-element(%p), index=2
  %layer = f32[512,64]{{1,0}} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %row = f32[64]{{0}} bitcast(%layer)
  %all-reduce = f32[64]{{0}} all-reduce(%row), channel_id=3, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  %updated = f32[4,64]{{1,0}} fusion(%sums, %all-reduce, %i), kind=kLoop, calls=%fused_update
  ROOT %carry = (s32[], f32[4,512,64]{{2,1,0}}, f32[4,64]{{1,0}}) tuple(%i, %stack, %updated)
}}

%condition (p.1: (s32[], f32[4,512,64], f32[4,64])) -> pred[] {{
  %p.1 = (s32[], f32[4,512,64]{{2,1,0}}, f32[4,64]{{1,0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (w: f32[64,512], x: f32[128,256], s: (s32[], f32[4,512,64], f32[4,64])) -> f32[128,512] {{
  %w = f32[64,512]{{1,0}} parameter(0)
  %x = f32[128,256]{{1,0}} parameter(1)
  %s = (s32[], f32[4,512,64]{{2,1,0}}, f32[4,64]{{1,0}}) parameter(2)
  %all-gather-start = ((f32[64,512]{{1,0}}), f32[512,512]{{1,0}}) all-gather-start(%w), channel_id=1, replica_groups=mesh['data'=8] {{'data'}}, dimensions={{0}}
  %scatter-start = ((f32[128,256]{{1,0}}), f32[16,256]{{1,0}}) async-start(%x), calls=%wrapped_reduce_scatter
  %cublas = (f32[128,128]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config={{{DOT.format(1)}}}
  %all-gather-done = f32[512,512]{{1,0}} all-gather-done(%all-gather-start)
  %scatter-done = f32[16,256]{{1,0}} async-done(%scatter-start)
  %while = (s32[], f32[4,512,64]{{2,1,0}}, f32[4,64]{{1,0}}) while(%s), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}
  ROOT %out = f32[128,512]{{1,0}} copy(%x)
}}

%wrapped_reduce_scatter (param.2: f32[128,256]) -> f32[16,256] {{
  %param.2 = f32[128,256]{{1,0}} parameter(0)
  ROOT %reduce-scatter = f32[16,256]{{1,0}} reduce-scatter(%param.2), channel_id=2, replica_groups=[1,8]<=[8], dimensions={{0}}, to_apply=%add
}}
"""


def test_what_runs_between_the_start_of_a_collective_and_its_end():
    gather = HloCollective("all-gather", ("data",), 1, 4 * 512 * 512, 1)
    scatter = HloCollective("reduce-scatter", ("data",), 1, 4 * 128 * 256, 1)
    product = HloKernel(4 * (2 * 128 * 256 + 128 * 128), Product(1, 128, 128, 256), "float32")
    found = schedule(STEP, {"data": 8})
    assert found[:5] == (
        Start("all-gather-start", gather, is_async=True),
        Start("scatter-start", scatter, is_async=True),
        product,
        End("all-gather-start"),
        End("scatter-start"),
    )
    assert found[6:] == (HloKernel(4 * (128 * 256 + 128 * 512)),)


def test_a_loop_touches_parts_of_its_stacks_and_waits_for_what_has_no_start():
    loop = schedule(STEP, {"data": 8})[5]
    reduction = HloCollective("all-reduce", ("data",), 1, 4 * 64, 1)
    assert loop == Loop(
        4,
        (
            HloKernel(4 * 2 * 512 * 64 + 4),
            Start("all-reduce", reduction, is_async=False),
            End("all-reduce"),
            HloKernel(4 * 2 * 64 + 4),
        ),
    )


def test_a_part_of_a_stack_that_is_copied_on_another_stream_is_one_kernel():
    """It touches what it copies, when it starts."""
    text = STEP.replace(
        "%layer = f32[512,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice",
        "%layer-start = ((f32[4,512,64]{2,1,0}, s32[]), f32[512,64]{1,0}, u32[]) fusion-start(%stack, %i), kind=kLoop, "
        "calls=%fused_slice\n  %layer = f32[512,64]{1,0} fusion-done(%layer-start)",
    )
    assert text != STEP
    assert schedule(text, {"data": 8}) == schedule(STEP, {"data": 8})


def test_a_look_up_reads_what_it_finds():
    text = """\
HloModule jit_step, is_scheduled=true

%fused_rows (table: f32[4096,64], rows: s32[8,1], sum: f32[32,64]) -> f32[8,64] {
  %table = f32[4096,64]{1,0} parameter(0)
  %rows = s32[8,1]{1,0} parameter(1)
  %sum = f32[32,64]{1,0} parameter(2)
  %found = f32[8,64]{1,0} gather(%table, %rows), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,64}
  %part = f32[8,64]{1,0} slice(%sum), slice={[0:8], [0:64]}
  ROOT %out = f32[8,64]{1,0} add(%found, %part)
}

ENTRY %main (t: f32[4096,64], r: s32[8,1], s: f32[32,64]) -> f32[8,64] {
  %t = f32[4096,64]{1,0} parameter(0)
  %r = s32[8,1]{1,0} parameter(1)
  %s = f32[32,64]{1,0} parameter(2)
  ROOT %out = f32[8,64]{1,0} fusion(%t, %r, %s), kind=kLoop, calls=%fused_rows
}
"""
    assert schedule(text, {"data": 8}) == (HloKernel(3 * 4 * 8 * 64 + 4 * 8),)
