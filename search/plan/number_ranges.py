"""Many numbers in few words: `0-3, 7` for 0, 1, 2, 3 and 7. Plans name layers, stages and ops so."""

from collections.abc import Sequence


def ranges(numbers: Sequence[int], between: str = ",") -> str:
    """Ascending numbers in words.

    Example:
      >>> ranges([0, 1, 2, 3, 7])
      '0-3,7'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return between.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbers_of(words: str) -> list[int]:
    """The numbers that words such as `0-3, 7` stand for."""
    runs = [run.split("-") for run in words.split(",")]
    return [n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]
