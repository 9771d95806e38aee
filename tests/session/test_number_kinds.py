"""A number that the step reads anew becomes a number of numpy's, and a plain one again."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import hocket


class Box:
    """Holds a number."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_each_kind_of_number_has_a_variant_of_its_own() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(5, 4) for _ in range(40)]
    ends = []
    for is_scheduled in (False, True):
        torch.manual_seed(1)
        model, box = nn.Linear(4, 3), Box(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(batch, model=model, box=box, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(batch) * getattr(box, "scale", 0.25)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = (
            hocket.schedule(step, model, optimizer, cache=False, guard=False, planner="serial")
            if is_scheduled
            else step
        )
        losses = []
        for number, batch in enumerate(batches):
            losses.append(float(run(batch)))
            box.scale = {20: 0.25, 21: np.float32(0.5), 28: 1.0}.get(number, box.scale)
        ends.append(losses)
    assert ends[0] == ends[1]
