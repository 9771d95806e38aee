"""Steps that the compiler has no model of in mind: their compiled form is as close as any other, or refused by name."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table

from hocket import native
from hocket.autotune.closeness import Closeness, sample
from hocket.autotune.forms import rewritten
from hocket.errors import CaptureError
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.job import Job
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.functional import functional_graph
from hocket.tracing.compiling.request import request_of
from support.captures import compiled_step
from support.refusals import fails

pytestmark = pytest.mark.skipif(not native.available(), reason=native.available().why)


def job(model: nn.Module, inputs: torch.Tensor, *, autocast: bool = False) -> Job:
    """A step that classifies; four classes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    labels = torch.randint(0, 4, (len(inputs),))

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, [(inputs, labels)])


def images(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6)


def convolutions(channels: int = 3) -> nn.Sequential:
    layers = (nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def half_channels_last() -> Job:
    model = convolutions()
    model[0].to(memory_format=torch.channels_last)
    return job(model, images())


class Spectrum(nn.Module):
    """Complex numbers inside a step; parameters and results are real."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


class Cells(nn.Module):
    """Cells that take their gates apart by ``unsafe_chunk`` and write into the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.ModuleList(nn.LSTMCell(8, 8) for _ in range(2)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [(x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)) for _ in self.cells]
        for given in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(given, states[number])
                given = states[number][0]
        return self.last(given)


STEPS: dict[str, tuple[Callable[[], Job], str]] = {
    "half channels last": (half_channels_last, ""),
    "half channels last, all last": (half_channels_last, "+channels-last"),
    "many channels": (
        lambda: job(
            nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), *convolutions(16)), torch.randn(4, 3, 12, 12)
        ),
        "+channels-last",
    ),
    "float64": (lambda: job(convolutions().double(), images().double()), ""),
    "bfloat16": (
        lambda: job(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16(), torch.randn(4, 8).bfloat16()
        ),
        "",
    ),
    "integers": (
        lambda: job(nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(18, 4)), torch.randint(0, 10, (4, 3))),
        "",
    ),
    "complex inside": (lambda: job(nn.Sequential(nn.Linear(8, 8), Spectrum(), nn.Linear(5, 4)), torch.randn(4, 8)), ""),
    "LSTM cells": (lambda: job(Cells(), torch.randn(3, 13, 8)), ""),
    "batch of one": (lambda: job(convolutions(), images(1)), "+channels-last"),
}


def captured(made: Job, form: str = "") -> Captured:
    """A step that has run once."""
    made.step(made.batch(0))
    plain = capture_step(made.step, made.model, made.optimizer, made.batch(0), split=False)
    return rewritten(plain, form) if form else plain


def lanes(of: Captured) -> closing[ThreadLanes]:
    return closing(ThreadLanes(of, Plan((Lane("main", of.graph.order, width=1),))))


@pytest.mark.slow  # each compiles a step
@pytest.mark.parametrize("name", STEPS)
def test_its_compiled_form_is_close(name: str, tmp_path: Path) -> None:
    make, form = STEPS[name]
    torch.manual_seed(0)
    made = make()
    plain = captured(made)
    compiled = compiled_step(captured(made, form), tmp_path, threads=2)
    assert compiled.wide is not None
    tiled = [[op.target.partition("winograd_")[2] for op in of.graph.ops] for of in (compiled, compiled.wide)]
    expected = ["convolution", "input_gradient", "weight_gradient"] if name == "many channels" else []
    assert sorted(filter(None, tiled[0])) == expected
    assert not any(tiled[1]), "the one in float64 is torch's"
    seen = Closeness()
    with lanes(plain) as eager, lanes(compiled) as executor:
        for number in range(3):
            found, _ = sample(plain, eager, {"form": executor}, made.batch(0), number, {"form": compiled.wide})
            seen = seen.and_sample(found["form"])
            made.step(made.batch(0))
    assert seen.holds, seen.why


def test_a_batch_norm_under_autocast_is_refused_by_name() -> None:
    """Inductor's statistics of it would be bfloat16, those of torch's kernel are float32."""
    document = request_of(captured(job(convolutions(), images(), autocast=True), "+channels-last"), threads=2).document
    with pytest.raises(
        CaptureError, match=r"native_batch_norm.default would make torch.bfloat16 instead of torch.float32"
    ):
        functional_graph(document, select_decomp_table(), wide=False)


def test_a_complex_parameter_is_refused_by_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.factor).abs()

    fails(CaptureError, "or a complex one", request_of, captured(job(Scaled(), torch.randn(3, 4))), threads=2)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_tensor_on_another_device_is_refused_by_name(is_given: bool) -> None:
    """One that the step is given, or one that it makes; this device has no data, as there may be no other one here."""
    of = captured(job(nn.Linear(4, 4), torch.randn(3, 4)))
    made = [slot for action in of.program.actions for call in action.calls for slot in call.outs.values()]
    elsewhere = of.inputs[0][0] if is_given else made[0]
    for node, slot in of.lowered.slot_of.items():
        if slot == elsewhere:
            node.meta["val"] = node.meta["val"].to("meta")
    fails(CaptureError, "holds a tensor on meta", request_of, of, threads=2)


def test_another_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    of = captured(job(nn.Linear(4, 4), torch.randn(3, 4)))
    request_of(of, threads=2)
    for version in ("2.16.0a0+git12", "3.0", "2.1.2"):
        monkeypatch.setattr(torch, "__version__", version)
        fails(CaptureError, r"of torch .* is not known, that of 2\.11 to 2\.15 is", request_of, of, threads=2)
