"""Paced workers: what they do is a recorded step, and what is said of their steps is counted right."""

from __future__ import annotations

import pytest

from benchmarks.namespaces import unavailable_reason
from benchmarks.paced import _summary, run
from benchmarks.paced.ranks import StepRecord
from benchmarks.paced.workload import Workload, recorded
from hocket.planning.transfers.receives import Receives

REASON = unavailable_reason()
# Two values of one second; a second of work needs the first, another one both.
TWO = Receives(("a", "b"), (1e6, 1e6), (0, 0), (1,), (1, 3), (1e6, 1e6), (0, 1))


def test_a_recorded_step_computes_as_long_as_it_receives():
    work = recorded("lenet", 1, 1e6, 0.5, batch_size=2)
    assert sum(work.receives.works_us) == pytest.approx(0.5e6)
    assert sum(work.sizes) == pytest.approx(0.5e6, rel=0.01)
    assert sorted(work.planned) == list(range(len(work.sizes)))
    assert work.receives.makespan_us(work.planned) <= work.upper_us
    assert work.efficiency(work.upper_us) == 0.0
    assert work.efficiency(work.lower_us) == 1.0


def test_what_is_said_of_steps():
    work = Workload(TWO, (1, 1), (0, 1), 1.0)
    assert (work.upper_us, work.lower_us) == (4e6, 2e6)

    def step(is_planned, order, *ends_s):
        return [StepRecord(order, is_planned, 0, int(end * 1e9)) for end in ends_s]

    steps = [
        *(step(True, (0, 1), 3.0, 3.0), step(True, (0, 1), 3.0, 3.0)),
        *(step(False, (1, 0), 4.0, 3.0), step(False, (1, 0), 4.0, 2.0)),
    ]
    row = _summary(work, steps, (1.0, 2.0))
    assert row["r2_of_efficiency"] == pytest.approx(1.0)
    assert row["planned"]["predicted_us"] == row["planned"]["step_us"] == 3e6
    assert row["random"]["predicted_us"] == row["random"]["step_us"] == 4e6
    assert row["planned"]["normalised_p95"] == 1.0
    assert row["planned"]["straggler_share"] == 0.0
    assert row["random"]["straggler_share"] == pytest.approx(0.375)
    assert row["throughput"] == pytest.approx(4 / 3)


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_paced_workers_of_a_cluster():
    (row,) = run(("lenet",), clusters=[(2, 2)], seconds=1.0, mbit=50, receiving_s=0.05)["rows"]
    assert (row["workers"], row["servers"]) == (2, 2)
    assert row["steps"] >= 12
