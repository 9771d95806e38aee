"""Plans on several lanes, chosen at random: whatever the order and the lanes, a legal plan computes the same bits."""

import functools
import random

import pytest
import torch
from torch import nn

from equivalence.compare import Twins, assert_same, copied, everything, named_leaves, twins
from equivalence.test_zoo import load
from execution.probe import KINDS
from hocket.checking import check
from hocket.execution import executor
from hocket.ir import Lane, Plan
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from quick import covering
from support.random_plans import on_lanes, random_order


def small_net() -> Job:
    """Every kind of order in one step: data, buffers, random numbers, in-place updates, gradients that are kept."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    batches = [(torch.randn(3, 1, 8, 8), torch.randint(0, 3, (3,))) for _ in range(3)]

    def step(batch):
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        return loss

    return Job(step, model, optimizer, batches)


JOBS = {
    "small net": small_net,
    "lstm-cells": lambda: load("lstm-cells", "adam"),
    "dcgan": lambda: load("dcgan", "adam"),
    "transformer": lambda: load("transformer", "adamw"),
}
# Each with the joint backward; those with convolutions also with the split one.
CASES = [(name, split) for name in JOBS for split in (False, True) if not split or name in ("small net", "dcgan")]
pytestmark = pytest.mark.usefixtures("one_thread")


def captured_twins(make, split: bool) -> tuple[Twins, Captured, Captured]:
    pair = twins(make)
    found = []
    for job in pair.both():
        torch.manual_seed(1)
        job.step(job.batch(0))
        found.append(capture(job.step, job.model, job.optimizer, job.batch(0), split=split))
    return pair, *found


@functools.cache
def cached_twins(name: str, split: bool) -> tuple[Twins, Captured, Captured]:
    """Twins that go on from where the test before left them: equal, or that test has failed."""
    return captured_twins(JOBS[name], split)


@pytest.mark.parametrize(("name", "split", "lanes", "kind"), covering(CASES, [2, 3], KINDS))
def test_any_legal_plan_computes_what_the_serial_plan_computes(name, split, lanes, kind):
    pair, first, second = cached_twins(name, split)
    chance = random.Random(f"{name} {split} {lanes}")
    serial = executor(first, Plan((Lane("main", first.graph.order),)), kind="python")
    for number in range(1, 4):
        plan = on_lanes(random_order(second.graph, chance), lanes, chance)
        check(second.graph, plan)
        planned = executor(second, plan, kind=kind)
        for again in range(2):
            torch.manual_seed(10 * number + again)
            expected = serial(pair.eager.batch(number))
            torch.manual_seed(10 * number + again)
            found = planned(pair.planned.batch(number))
            assert_same(named_leaves("returned", expected), named_leaves("returned", found))
            assert_same(everything(pair.eager), everything(pair.planned), str(plan))
        spans = planned.timeline().by_op
        for edge in second.graph.edges:
            assert spans[edge.src].end_us <= spans[edge.dst].start_us, edge
        planned.close()


@pytest.mark.parametrize("name", JOBS)
def test_a_serial_plan_of_one_thread_computes_what_eager_computes_on_one_thread(name):
    pair, _, second = captured_twins(JOBS[name], False)
    chance = random.Random(name)
    for number in range(1, 4):
        planned = executor(second, Plan((Lane("main", tuple(random_order(second.graph, chance))),)), kind="python")
        torch.manual_seed(number)
        pair.eager.step(pair.eager.batch(number))
        torch.manual_seed(number)
        planned(pair.planned.batch(number))
        assert_same(copied(pair.eager), copied(pair.planned))


def test_a_plan_on_lanes_of_different_widths_repeats_bit_for_bit():
    pair, first, second = captured_twins(small_net, True)
    chance = random.Random(5)
    plan = on_lanes(random_order(second.graph, chance), 3, chance)
    plan = Plan(tuple(Lane(lane.name, lane.ops, width=width) for width, lane in enumerate(plan.lanes, 1)))
    results = []
    for captured, job in ((first, pair.eager), (second, pair.planned)):
        torch.manual_seed(3)
        results.append(executor(captured, plan, kind="python")(job.batch(1)))
    assert torch.equal(*results)
    assert_same(everything(pair.eager), everything(pair.planned))
