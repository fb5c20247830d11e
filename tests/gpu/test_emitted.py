"""Programs compile with the options that they carry: on GPUs those go through JAX, in `verify` through XLA's flags."""

from tests.gpu.apart import said


def test_programs_compile_with_the_options_that_they_carry():
    assert {"forward 0", "backward 1", "update 1"} < set(said("emitted_programs"))
