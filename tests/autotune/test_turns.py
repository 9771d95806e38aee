"""Two contenders in turns: which is faster, or that it is not clear."""

from collections import Counter

import pytest

from hocket.autotune.turns import BLOCK, MAX_ATTEMPTS, NUM_ROUNDS, Turns


def played(duration_ms: dict[str, float], *, late_ms: float = 0.0) -> tuple[Turns, Counter[str]]:
    """All turns, in which the first step of each block takes longer by `late_ms`, and how many steps each made."""
    found, counts = Turns("old", "new", "seed"), Counter[str]()
    number = 0
    while not found.is_over:
        label = found.contender
        counts[label] += 1
        found.note(duration_ms[label] + (late_ms if number % BLOCK == 0 else 0.0))
        number += 1
    return found, counts


@pytest.mark.parametrize(("old_ms", "new_ms", "is_faster"), [(2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_faster_one_is_found_whatever_the_first_step_of_a_block_takes(
    old_ms: float, new_ms: float, is_faster: bool
) -> None:
    found, counts = played({"old": old_ms, "new": new_ms}, late_ms=50.0)
    assert found.is_clear
    assert found.is_faster == is_faster
    assert found.speedup == found.low == found.high == old_ms / new_ms
    assert counts == {"old": NUM_ROUNDS * BLOCK, "new": NUM_ROUNDS * BLOCK}
    assert found.incumbent_ms == (old_ms,) * (NUM_ROUNDS * (BLOCK - 1))


def test_what_is_not_clear_is_repeated_and_then_a_draw() -> None:
    found, number = Turns("old", "new", "seed"), 0
    while not found.is_over:
        found.note(1.0 + number * 7 % 5)
        number += 1
    assert number == 2 * MAX_ATTEMPTS * NUM_ROUNDS * BLOCK
    assert not found.is_clear
    assert not found.is_faster


def test_a_gain_too_small_to_matter_is_no_gain() -> None:
    found, _ = played({"old": 1.005, "new": 1.0})
    assert not found.is_faster
