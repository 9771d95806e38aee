"""A number of the batch that is computed with is read anew in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equivalence.compare import check_twins, serial
from equivalence.test_steps import mlp
from hocket.execution.threads import ThreadLanes
from hocket.tracing import capture
from tracing.recording.batch_steps import batch_of, job_of, loss_of, scaled


def function_of(batch):
    weight = batch["weight"].item()
    return (weight**2 if weight > 0.1 else weight) / (1 + batch["count"].item())


def added_up(batch):
    total = torch.tensor(0.0)
    for each in batch["mask"]:
        total += each.sum() * batch["weight"]
    return total


def loss_and_weight(model, batch):
    loss = loss_of(model, batch)
    return nn.functional.huber_loss(model(batch["inputs"]), batch["targets"], delta=batch["weight"].item()) + loss


NUMBERS = {
    "a list of tensors": scaled(lambda batch: torch.tensor([batch["mask"].min(), 2.0, batch["weight"]]).sum()),
    "an item": scaled(lambda batch: batch["weight"].item()),
    "a function of items": scaled(function_of),
    "a sum that begins as a tensor": scaled(added_up),
    "a tensor of an item": scaled(lambda batch: torch.tensor([batch["weight"].item(), 2.0]).sum()),
    "a parameter made of it": scaled(lambda batch: nn.Parameter(batch["weight"].clone(), False).item()),
    "a divisor": scaled(lambda batch: 1 / batch["mask"].sum().item()),
    "an option of a loss": loss_and_weight,
}


def weighted(seed: int):
    generator = torch.Generator().manual_seed(seed + 50)
    further = {
        "weight": torch.rand((), generator=generator) + 0.5,
        "count": torch.tensor(seed),
        "mask": (torch.rand(4, 6, generator=generator) > 0.3).long(),
    }
    return batch_of(seed, **further)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_the_batch_is_read_anew_in_every_step(number):
    check_twins(lambda: job_of(NUMBERS[number], [weighted(seed) for seed in range(4)]))


def test_numbers_that_were_equal_are_read_anew_one_by_one():
    """Actions of a memory, say, of which a tensor is made."""
    body = scaled(lambda batch: (torch.tensor([each.item() for each in batch["many"]]) * torch.arange(4)).sum())
    many = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 1], [2, 0, 1, 1]])
    check_twins(lambda: job_of(body, [batch_of(seed, many=each) for seed, each in enumerate(many)]))


def test_a_number_of_the_batch_can_be_returned():
    model = mlp()

    def step(batch):
        loss = loss_of(model, batch)
        return {"loss": loss, "weight": batch["weight"].item(), "whole": int(batch["mask"].sum() * 0)}

    captured = capture(step, model, None, weighted(0))
    lanes = ThreadLanes(captured, serial(captured))
    for seed in range(3):
        expected, found = step(weighted(seed)), lanes(weighted(seed))
        assert found["weight"] == expected["weight"]
        assert found["whole"] == expected["whole"]
        assert torch.equal(found["loss"], expected["loss"])
    lanes.close()


def test_a_number_that_a_branch_asks_for_is_guarded():
    body = scaled(lambda batch: 2 if batch["weight"].item() == 0.5 else 3)
    batches = [batch_of(seed, weight=torch.tensor(0.5)) for seed in range(3)]
    captured = check_twins(lambda: job_of(body, batches))
    assert not captured.holds(batch_of(0, weight=torch.tensor(0.25)))
