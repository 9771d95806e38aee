"""A bench with a time budget begins what fits, and names what it leaves out."""

from __future__ import annotations

from benchmarks.budget import Budget


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spend(budget: Budget, clock: Clock, what: str, took_s: float, **options) -> bool:
    with budget.item(what, **options) as begun:
        if begun:
            clock.now_s += took_s
    return begun


def test_an_item_is_guessed_by_the_dearest_of_its_kind():
    clock = Clock()
    budget = Budget(100.0, clock)
    assert spend(budget, clock, "a", 10.0, units=2)
    assert spend(budget, clock, "b", 8.0)  # 8 s per unit
    assert not spend(budget, clock, "c", 1.0, units=11), "88 s are more than the 82 that are left"
    assert spend(budget, clock, "d", 1.0, units=10)
    assert budget.left_out == {"c": "c: no time: expected 88 s, 82 s left of 100"}
    assert budget.left_s() == 81.0


def test_the_first_of_a_kind_begins_while_any_time_is_left():
    clock = Clock()
    budget = Budget(10.0, clock)
    assert spend(budget, clock, "a", 9.0)
    assert not spend(budget, clock, "b", 1.0)
    assert spend(budget, clock, "c", 5.0, kind="other")
    assert not spend(budget, clock, "d", 0.0, kind="third")
    assert budget.left_s() == 0.0


def test_a_kind_may_be_held_to_a_share():
    clock = Clock()
    budget = Budget(90.0, clock)
    assert spend(budget, clock, "a", 20.0, kind="compile", share=1 / 3)
    assert not spend(budget, clock, "b", 20.0, kind="compile", share=1 / 3)
    assert "expected 20 s, 10 s left" in budget.left_out["b"]
