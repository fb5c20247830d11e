"""A compiled program in numbers, added up by hand."""

from dataclasses import replace

from autoshard.cost_model.xla.compiler import Compiled
from autoshard.cost_model.xla.stats import CompiledStats

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%body (param.1: f32[64]) -> f32[64] {
  %param.1 = f32[64]{0} parameter(0)
  %gathered = f32[512]{0} all-gather(%param.1), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %there = f32[512]{0:S(5)} copy(%gathered)
  ROOT %back = f32[512]{0} copy(%there)
}

ENTRY %main (param.2: f32[64], param.3: f32[16]) -> f32[64] {
  %param.2 = f32[64]{0} parameter(0)
  %param.3 = f32[16]{0} parameter(1)
  %summed = f32[64]{0} all-reduce(%param.2), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %kept = f32[16]{0:S(5)} copy(%param.3)
  ROOT %while = f32[64]{0} while(%summed), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""

COMPILED = Compiled(
    TEXT, argument_bytes=1000, output_bytes=700, alias_bytes=600, temporary_bytes=50, host_bytes=9
)
MESH = {"data": 2, "model": 4}


def test_a_program_s_numbers():
    stats = CompiledStats.of(COMPILED, MESH)
    assert (stats.argument_bytes, stats.fresh_output_bytes, stats.temporary_bytes) == (1000, 100, 50)
    assert stats.host_bytes == 9
    assert stats.collectives == {
        ("all-gather", ("model",)): (3, 3 * 4 * 512),
        ("all-reduce", ("data",)): (1, 4 * 64),
    }
    assert stats.host_copies == {"to host": (3 + 1, 3 * 4 * 512 + 4 * 16), "from host": (3, 3 * 4 * 512)}


def test_the_peak_counts_a_result_that_takes_over_an_argument_once():
    stats = CompiledStats.of(COMPILED, MESH)
    assert stats.peak_bytes == COMPILED.peak_bytes == 1000 + (700 - 600) + 50


def test_a_direction_in_which_nothing_goes_is_left_out():
    no_copies = replace(COMPILED, text=TEXT.replace("S(5)", "S(0)"))
    assert CompiledStats.of(no_copies, MESH).host_copies == {}
