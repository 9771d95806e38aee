"""What a first call does once, and no more often: it may take as long as some twenty steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion import choose, executor, programs


class Branching(nn.Module):
    """Recorded: torch.fx cannot follow a branch on shapes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) if x.shape[0] > 1 else x[:, :2]


MAKERS = {"symbolic": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "recorded": Branching}


def counted(monkeypatch, holder, name):
    """How often a function is called, in a list of as many items."""
    calls, usual = [], getattr(holder, name)

    def count(*args, **kwargs):
        calls.append(args)
        return usual(*args, **kwargs)

    monkeypatch.setattr(holder, name, count)
    return calls


@pytest.mark.parametrize("traced", MAKERS)
@pytest.mark.parametrize("num_models", [1, 2])
def test_each_part_of_a_first_call(traced, num_models, monkeypatch):
    array = hocket.fuse([MAKERS[traced]() for _ in range(num_models)], shared=True)
    looked_up = counted(monkeypatch, programs, "Globals")
    made = counted(monkeypatch, executor, "FusedProgram")
    timed = counted(monkeypatch, choose, "_took_s")
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    array.losses(F.cross_entropy, x, y).sum().backward()
    assert array._calls.programs.made(), "traced"
    assert len(looked_up) == 1
    assert len(made) == (0 if num_models == 1 else num_models), "one model's program is that of all"
    assert len(timed) <= 3 * 2 * (num_models > 1), "three passes of each of two plans; one plan is not timed"
    array.losses(F.cross_entropy, x, y).sum().backward()
    assert len(looked_up) == 1
