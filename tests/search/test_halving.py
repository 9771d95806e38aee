"""A rung is decided at once and keeps exactly the best."""

import random

import pytest

from hocket import Asha, Halving, Hyperband
from support.refusals import refused


def reference(values, keep, maximize):
    """The best ones, of equal ones the first."""
    ranked = sorted(range(len(values)), key=lambda n: (-values[n] if maximize else values[n], n))
    return set(ranked[:keep])


def test_a_thousand_random_rungs_keep_exactly_the_best():
    drawn = random.Random(0)
    for _ in range(1000):
        trials, eta, maximize = drawn.randint(2, 40), drawn.randint(2, 5), drawn.random() < 0.5
        policy = Halving(eta=eta).policy(trials, eta**3, maximize)
        for number in range(trials):
            assert policy.start(number) == 1
        values = [drawn.choice([drawn.random(), 0.5]) for _ in range(trials)]
        failed = {n for n in range(trials) if drawn.random() < 0.1}
        moves = []
        for number in drawn.sample(range(trials), trials):
            assert not moves  # nothing is decided before the last one is there
            moves += policy.fail(number) if number in failed else policy.report(number, 1, values[number])
        alive = [n for n in range(trials) if n not in failed]
        best = reference([values[n] for n in alive], max(1, trials // eta), maximize)
        assert {move.number for move in moves if move.what == "go"} == {alive[place] for place in best}
        assert {move.number for move in moves} == set(alive)


def ends(policy, trials, value, epochs):
    """End of each trial, and its number of epochs; reports come rung by rung."""
    until = {number: policy.start(number) for number in range(trials)}
    at = dict.fromkeys(until, 0)
    found = {}

    def apply(moves):
        for move in moves:
            if move.what == "go":
                until[move.number] = move.until
            else:
                found[move.number] = (move.what, at[move.number])

    apply(policy.all_started())
    while len(found) < trials:
        due = [number for number in until if number not in found and at[number] < until[number]]
        assert due, "nobody may go on, and not all are over"
        for number in due:
            if number not in found:
                at[number] = until[number]
                apply(policy.report(number, at[number], value(number)))
    return found


def test_nine_trials_become_three_become_one():
    found = ends(Halving(eta=3).policy(9, 9, maximize=False), 9, lambda number: number % 5, 9)
    assert {number for number, (what, _) in found.items() if what == "complete"} == {0}
    assert {number for number, (_, epoch) in found.items() if epoch > 1} == {0, 5, 1}


def test_hyperband_is_the_papers():
    brackets = Hyperband(eta=3).brackets(81)
    table = [[(size, [rung.epoch for rung in rungs], [rung.keep for rung in rungs])] for size, rungs in brackets]
    assert table == [
        [(81, [1, 3, 9, 27, 81], [27, 9, 3, 1, 0])],
        [(34, [3, 9, 27, 81], [11, 3, 1, 0])],
        [(15, [9, 27, 81], [5, 1, 0])],
        [(8, [27, 81], [2, 0])],
        [(5, [81], [0])],
    ]
    assert Hyperband(eta=3).trials(81) == 143
    assert [rungs[-1].epoch for _, rungs in Hyperband(eta=3, skip_last=2).brackets(81)] == [9, 9, 9, 27, 81]


@pytest.mark.parametrize("halving", [Halving(eta=2), Halving(eta=4, min_epochs=2), Hyperband(), Asha(), Asha(eta=2)])
@pytest.mark.parametrize("trials", [1, 2, 7, 30])
def test_every_trial_ends_and_the_best_goes_to_the_end(halving, trials):
    trials = halving.trials(27) or trials
    found = ends(halving.policy(trials, 27, maximize=True), trials, float, 27)
    assert len(found) == trials
    assert found[trials - 1] == ("complete", 27)


def test_trials_that_fail_hold_nobody_up():
    policy = Halving(eta=3).policy(3, 9, maximize=False)
    for number in range(3):
        policy.start(number)
    assert list(policy.fail(0)) == []
    assert list(policy.report(1, 1, 0.1)) == []
    assert [move.number for move in policy.fail(2)] == [1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Halving(eta=1), "eta: expected a whole number >= 2, got 1"),
        (lambda: Asha(min_epochs=0), "min_epochs: expected a whole number >= 1, got 0"),
        (lambda: Hyperband(skip_last=-1), "skip_last: expected a whole number >= 0"),
        (lambda: Hyperband(min_epochs=9).brackets(3), "expected at most epochs=3, got 9"),
    ],
)
def test_bad_numbers_are_named(make, words):
    refused(words, make)
