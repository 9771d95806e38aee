"""Whole jobs of real processes compute what one process does."""

import numpy as np
import pytest
import torch

from distributed.ranks import returned
from distributed.training import check_as_together, rank_of_job, training
from hocket.ir import Plan


@pytest.mark.parametrize(
    ("servers", "optimizer", "clip"),
    [
        pytest.param(1, "sgd", False, marks=pytest.mark.slow),
        (2, "adam", True),
        pytest.param(2, "adam", False, marks=pytest.mark.slow),
        pytest.param(1, "adam", True, marks=pytest.mark.slow),
    ],
    ids=["sgd", "clipped, adam on two servers", "adam on two servers", "clipped"],
)
def test_fifty_steps_are_those_of_one_process(servers, optimizer, clip):
    one = training(optimizer, clip=clip)
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 5, 0.7)
    found = returned(rank_of_job, 2 + servers, servers, 50, optimizer, clip, "auto", "python", True, timeout_s=120)
    assert found[2:] == [50] * servers
    losses = check_as_together(found[0][3], one, 2, 50, scheduler)
    for mine, its in zip(losses, (found[0][0], found[1][0]), strict=True):
        assert np.allclose(mine, its, rtol=1e-12, atol=1e-12)
    for name in one.model.state_dict():
        assert np.array_equal(found[1][3][name], found[0][3][name]), name
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize(
    ("order", "executor"),
    [("layer", "native"), ("reverse", "python"), pytest.param("random", "python", marks=pytest.mark.slow)],
)
def test_parameters_arrive_in_the_order_of_the_plan_in_every_step(order, executor):
    first, second, steps = returned(rank_of_job, 3, 1, 6, "sgd", False, order, executor, timeout_s=120)
    assert steps == 6
    plan = Plan.parse(first[2])
    (lane,) = [lane for lane in plan.lanes if lane.device == "server0->cpu0"]
    expected = tuple(op.removeprefix("pull:") for op in lane.ops)
    assert plan.planner == f"transfers-{order}"
    assert first[1] == second[1] == [{"server0": expected}] * 6
    if order == "layer":
        assert expected[0].startswith("first.")
    if order == "reverse":
        assert expected[-1].startswith("first.")
