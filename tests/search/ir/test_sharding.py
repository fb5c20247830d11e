"""Values on their ways: who shares which steps."""

from autoshard.search.ir.sharding import OperandReshard, ReshardPath, ReshardStep, SharedPaths

GATHER = ReshardStep("all-gather", (0,), 8.0, (-1,))
PERMUTE = ReshardStep("collective-permute", (0,), 8.0, (1,))
SLICE = ReshardStep("slice", (0,), 8.0, (0,))


def arrived(*readers: tuple[str, ReshardPath, str]) -> tuple[list[str], list[str]]:
    """What each reader gets of a value on its path in its phase, spelled as the steps behind it; and all that was done."""
    shared, done = SharedPaths[str](), []

    def start(value: str) -> str:
        done.append(value)
        return value

    def take(here: str, step: ReshardStep) -> str:
        done.append(f"{here} {step.kind}")
        return done[-1]

    reshards = [(value, OperandReshard(path, phase)) for value, path, phase in readers]
    got = [shared.arrive(value, reshard, lambda v=value: start(v), take) for value, reshard in reshards]
    return got, done


def test_steps_are_taken_one_after_another():
    got, done = arrived(("x", (GATHER, SLICE), ""))
    assert got == ["x all-gather slice"]
    assert done == ["x", "x all-gather", "x all-gather slice"]


def test_readers_share_how_their_paths_begin():
    got, done = arrived(("x", (GATHER,), ""), ("x", (GATHER, SLICE), ""), ("x", (), ""), ("x", (GATHER,), ""))
    assert got == ["x all-gather", "x all-gather slice", "x", "x all-gather"]
    assert done == ["x", "x all-gather", "x all-gather slice"]


def test_paths_that_begin_otherwise_are_apart():
    got, done = arrived(("x", (GATHER, SLICE), ""), ("x", (PERMUTE, SLICE), ""))
    assert got == ["x all-gather slice", "x collective-permute slice"]
    assert len(done) == 5


def test_what_is_made_anew_in_a_phase_is_shared_in_it_alone():
    _, done = arrived(("x", (GATHER,), ""), ("x", (GATHER,), "backward"), ("x", (GATHER,), "backward"))
    assert done == ["x", "x all-gather"] * 2


def test_values_are_told_apart():
    assert arrived(("x", (GATHER,), ""), ("y", (GATHER,), ""))[0] == ["x all-gather", "y all-gather"]
