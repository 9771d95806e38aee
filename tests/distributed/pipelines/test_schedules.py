"""Torch's schedules as orders: all that it offers, each complete."""

import pytest

from hocket.distributed.pipelines.split import SCHEDULES, has_one_stage_a_rank, torch_order
from hocket.planning.partition.pipeline_order import pipeline_step_us
from support.refusals import refused


def test_all_that_torch_offers_is_there():
    assert {
        "1f1b",
        "gpipe",
        "interleaved1f1b",
        "loopedbfs",
        "interleavedzerobubble",
        "zbvzerobubble",
        "dualpipev",
    } <= set(SCHEDULES)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_each_stage_works_once_on_each_micro_batch(name, ranks):
    stages = ranks if has_one_stage_a_rank(name) else 2 * ranks
    microbatches = 2 * ranks
    order = torch_order(name, stages=stages, ranks=ranks, microbatches=microbatches)
    actions = [action for rank in order.ranks for action in rank]
    assert len(set(actions)) == len(actions)
    done = {kind: {(a.stage, a.micro_batch) for a in actions if a.kind == kind} for kind in "FBIW"}
    everything = {(stage, batch) for stage in range(stages) for batch in range(microbatches)}
    assert done["F"] == everything
    assert done["I"] == done["W"]
    assert done["B"] | done["I"] == everything
    assert not done["B"] & done["I"]
    # A step takes at least what the busiest rank does, and less than all of it in turn.
    step_us = pipeline_step_us(order, [1.0] * stages, [2.0] * stages, [0.0] * stages)
    assert 3.0 * microbatches * stages / ranks <= step_us < 3.0 * microbatches * stages


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("zigzag", (2, 2, 2), "unknown schedule 'zigzag'; one of 1f1b, gpipe"),
        ("1f1b", (4, 2, 4), "schedule '1f1b' has one stage for each rank, got 4 stages for 2 ranks"),
        ("loopedbfs", (5, 2, 4), "5 stages cannot be shared by 2 ranks evenly"),
        ("zbvzerobubble", (6, 2, 6), "ZBV requires exactly 2 stages per rank"),
        ("dualpipev", (4, 2, 3), "at least as many microbatches as stages"),
        ("interleaved1f1b", (8, 4, 9), "multiple of the number of rounds"),
    ],
)
def test_numbers_that_a_schedule_does_not_take(name, numbers, message):
    stages, ranks, microbatches = numbers
    refused(message, torch_order, name, stages=stages, ranks=ranks, microbatches=microbatches)


def test_names_are_torchs_in_any_case():
    assert torch_order("ScheduleGPipe", stages=2, ranks=2, microbatches=2).rank_of == (0, 1)
