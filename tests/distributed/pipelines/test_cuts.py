"""Models at all places where they may be cut: layouts, buffers that the forward writes, complex numbers."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipeline

import hocket
from distributed.pipelines.trained import gradients_by_stages
from hocket.distributed.pipelines import split

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("latest", torch.zeros(4, 8))


class Turned(Layers):
    def forward(self, value):
        value = self.first(value).t()
        return self.second(value.tanh().t()) + value.t().expand(2, -1, -1)[1]


class Written(Layers):
    def forward(self, value):
        self.steps += 1
        value = self.first(value)
        self.average.mul_(0.9).add_(value.detach().mean(0), alpha=0.1)
        self.latest = value.detach()
        return self.second(value.tanh() + self.average).sin()


class Complex(Layers):
    def forward(self, value):
        value = torch.fft.fft(self.first(value))
        return self.second(torch.fft.ifft(value * 2).real).sin()


@pytest.mark.parametrize(("kind", "stages"), [(Turned, 3), (Written, 2), (Complex, 2)])
def test_every_cut_that_is_allowed_gives_eagers_gradients_and_buffers(kind, stages, monkeypatch):
    torch.manual_seed(0)
    eager, batch = kind().double(), torch.randn(4, 8, dtype=torch.float64)
    state = {name: value.clone() for name, value in eager.state_dict().items()}
    expected = eager(batch)
    expected.square().mean().backward()
    places: list[int] = []

    def first_place(chain, *_, **__):
        places[:] = [place for place, size in enumerate(chain.crossing_bytes) if place > 0 and size < float("inf")]
        return SimpleNamespace(begins=begins)

    monkeypatch.setattr(split, "cut_for_schedule", first_place)
    ahead: list[tuple[int, ...]] = [()]
    for begins in ahead:
        model = kind().double()
        model.load_state_dict(state)
        pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(stages))
        if not begins:
            ahead += combinations(places, stages - 1)
            assert len(ahead) > 3, "there are places to cut at"
            continue
        output, found = gradients_by_stages(pipe, batch)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-14, msg=f"{name} {begins}")
        for stage in range(stages):
            for name, buffer in pipe.get_stage_module(stage).named_buffers():
                torch.testing.assert_close(buffer, eager.get_buffer(name), msg=f"{name} {begins}")
