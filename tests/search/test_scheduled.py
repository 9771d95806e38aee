"""A fused step that is captured and planned once serves the whole search: trials move by values only."""

from dataclasses import replace

import pytest
from tests.search.pieces import BATCHES, LR, train
from tests.search.searches import advance, as_serial, assert_runs_alone

from hocket.search.fused import FusedTrainer
from hocket.search.run import Run
from hocket.session import schedule


def train_long(params):
    return replace(train(params), batches=BATCHES * 20)


@pytest.fixture
def planned(monkeypatch):
    """Planning costs nothing, so it pays from the first epoch on that tells how long a step takes."""
    monkeypatch.setattr("hocket.search.fused.PLANNING_S", -1e9)


def test_swaps_leave_a_captured_step_as_it_is(planned):
    stages = []

    def runner(step, array, optimizer):
        return schedule(
            step, array, optimizer, cache=False, guard=False, on_progress=lambda stage, _: stages.append(stage)
        )

    runs = [Run(number, {"lr": 0.01 * (number + 1), "step": 1 + number % 3}, seed=0) for number in range(6)]
    trainer = FusedTrainer(train_long, runs[:3], 0, frozenset({"lr"}), draws=False, runner=runner)

    advance(trainer)
    trainer.plan_if_it_pays(0)
    while not trainer.step.decided:
        advance(trainer)
    searched_for = len(stages)
    for slot, run in enumerate(runs[3:]):
        trainer.put(slot, run)
        advance(trainer)
    trainer.put(1, runs[0])
    advance(trainer)
    assert len(stages) == searched_for  # nothing was captured or tried again
    assert trainer.step.verdict == "planned", trainer.step.why
    trainer.close()
    assert_runs_alone(runs, train_long)


def test_a_scheduled_search_gives_the_values_of_a_serial_one(planned):
    made = []

    def runner(step, array, optimizer):
        made.append(step)
        return schedule(step, array, optimizer, cache=False)

    _, record = as_serial(train_long, {"lr": LR}, trials=4, epochs=3, executor="scheduled", slots=2, runner=runner)
    assert record.searches == len(record.groups) == len(made) == 1


def test_a_step_is_planned_only_where_what_is_ahead_pays_for_it(monkeypatch):
    made = []

    def runner(step, array, optimizer):
        made.append(step)
        return lambda inputs, target: step(inputs, target)

    runs = [Run(number, {"lr": 0.01}, seed=0, until=10) for number in range(2)]
    trainer = FusedTrainer(train, runs, 0, draws=False, runner=runner)
    trainer.plan_if_it_pays(0)
    assert not made  # nobody knows yet how long a step takes
    advance(trainer, 2)
    trainer.step_s = 1.0  # 8 epochs of 3 steps are ahead
    monkeypatch.setattr("hocket.search.fused.PLANNING_STEPS", 0)
    for cost_s, waiting, count in ((12.5, 0, 0), (12.5, 1, 1), (0.0, 4, 1)):
        monkeypatch.setattr("hocket.search.fused.PLANNING_S", cost_s)
        trainer.plan_if_it_pays(waiting)
        assert len(made) == count
