"""A fused step that is captured and planned once serves the whole search: trials move by values only."""

from __future__ import annotations

import pytest
from tests.search.pieces import BATCHES, LR, assert_same, searched, train

from hocket import Training
from hocket.search.fused import FusedTrainer
from hocket.search.run import Run
from hocket.search.serial import SerialTrainer
from hocket.session import schedule


def train_long(params):
    made = train(params)
    return Training(made.model, made.optimizer, made.loss, BATCHES * 20, made.metric, made.scheduler)


def test_swaps_leave_a_captured_step_as_it_is():
    stages = []

    def runner(step, array, optimizer):
        return schedule(
            step, array, optimizer, cache=False, guard=False, on_progress=lambda stage, _: stages.append(stage)
        )

    runs = [Run(number, {"lr": 0.01 * (number + 1), "step": 1 + number % 3}, seed=0) for number in range(6)]
    trainer = FusedTrainer(train_long, runs[:3], 0, frozenset({"lr"}), draws=False, runner=runner)

    def epoch():
        for run, result in trainer.advance():
            run.values.append(result.value)

    while not trainer.step.decided:
        epoch()
    searched_for = len(stages)
    for slot, run in enumerate(runs[3:]):
        trainer.put(slot, run)
        epoch()
    trainer.put(1, runs[0])
    epoch()
    assert len(stages) == searched_for  # nothing was captured or tried again
    assert trainer.step.verdict == "planned", trainer.step.why
    trainer.close()
    for run in runs:
        alone = Run(0, run.params, seed=0)
        serial = SerialTrainer(train_long, 0)
        serial.put(0, alone)
        for _ in range(run.epochs):
            [(_, result)] = serial.advance()
            alone.values.append(result.value)
        assert run.values == pytest.approx(alone.values, rel=1e-9)


def test_a_scheduled_search_gives_the_values_of_a_serial_one():
    def runner(step, array, optimizer):
        return schedule(step, array, optimizer, cache=False)

    options = {"trials": 4, "epochs": 3}
    together, record = searched(train_long, {"lr": LR}, executor="scheduled", slots=2, runner=runner, **options)
    serial, _ = searched(train_long, {"lr": LR}, executor="serial", **options)
    assert_same(serial, together)
    assert record.searches == len(record.groups) == 1
