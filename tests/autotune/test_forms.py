"""Further forms of a step: layouts only where there are convolutions, and when compiled ones are made and kept."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket import native
from hocket.autotune import forms, tuner
from hocket.autotune.forms import BEGIN_AFTER_S, FormCompiler, rewritten_forms
from hocket.session import Schedule
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.process import CompilingProcess, niceness
from support.steps import training_step

pytestmark = pytest.mark.skipif(not native.available(), reason=native.available().why)


def job(width: int = 8) -> hocket.Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = training_step(model, optimizer, nn.functional.mse_loss)
    return hocket.Job(step, model, optimizer, [(torch.randn(4, width), torch.randn(4, 4))])


def captured(made: hocket.Job) -> Captured:
    made.step(made.batch(0))
    return capture_step(made.step, made.models, made.optimizers, made.batch(0), split=False)


def decided(fast: Schedule, made: hocket.Job) -> None:
    for number in range(600):
        fast(made.batch(number))
        if fast.decided:
            return
    raise AssertionError("no decision")


def test_a_step_is_compiled_tried_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "SLOWER_FORM", math.inf)  # no form is left out for its time
    made = job()
    fast = Schedule(made.step, made.model, made.optimizer, numerics="close", cache=tmp_path)
    decided(fast, made)
    assert "+compiled" not in fast._pool.current.forms
    assert fast.compile()
    assert not fast.decided
    decided(fast, made)
    assert "+compiled" in fast._pool.current.forms
    assert not fast.compile()
    kept = {each.name for each in tmp_path.iterdir()}
    again = job()
    second = Schedule(again.step, again.model, again.optimizer, numerics="close", cache=tmp_path)
    decided(second, again)
    assert "+compiled" in second._pool.current.forms
    # The plan need not be as fast again beside other tests. Nothing is compiled or kept anew.
    assert {each.name for each in tmp_path.iterdir()} == kept
    for each in (fast, second):
        each.close()


def test_a_bitwise_step_is_not_compiled() -> None:
    made = job()
    fast = Schedule(made.step, made.model, made.optimizer)
    decided(fast, made)
    assert not fast.compile()
    fast.close()


class Begun:
    """Stands for a compilation: notes that it was started, and is never done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_started = self.is_done = False

    def found(self) -> None:
        return None

    def start(self, process: CompilingProcess) -> None:
        self.is_started = True
        self.nice = process._nice


def test_a_short_lived_step_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forms, "Compiling", Begun)
    compiler = FormCompiler(tmp_path)
    assert compiler.offered("+compiled", captured(job())) is None
    (begun,) = compiler._left.values()
    assert not compiler.note(BEGIN_AFTER_S * 900, speedup=2.0)
    assert not begun.is_started
    assert not compiler.note(BEGIN_AFTER_S * 200, speedup=2.0)
    assert begun.is_started
    assert begun.nice == niceness(2.0) < niceness(1.0), "the faster the steps, the more is left for it"


@pytest.mark.parametrize(
    ("step_ms", "left"),
    [
        ({"": 3.0, "+fused-update": 2.5, "+channels-last+fused-update": 2.0}, ["+channels-last+compiled"]),
        ({"": 3.0, "+fused-update": 1.5, "+channels-last+fused-update": 2.0}, ["+compiled"]),
        ({"+channels-last+fused-norm": 2.0}, ["+channels-last+compiled"]),
        ({"rule+fused-update": 2.0}, ["+compiled", "+channels-last+compiled"]),
    ],
)
def test_of_two_layouts_the_faster_one_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_ms: dict[str, float], left: list[str]
) -> None:
    monkeypatch.setattr(forms, "Compiling", Begun)
    compiler = FormCompiler(tmp_path)
    step = captured(job())
    for form in ("+compiled", "+channels-last+compiled"):
        compiler.offered(form, step)
    compiler.only_fastest_layout(step_ms)
    assert list(compiler._left) == left


def test_what_is_being_compiled_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forms, "Compiling", Begun)
    compiler = FormCompiler(tmp_path)
    compiler.offered("+compiled", captured(job()))
    compiler.start()
    compiler.only_fastest_layout({"": 3.0, "+channels-last": 2.0})
    assert list(compiler._left) == ["+compiled"]


def failure_of(compiler: FormCompiler, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, "hocket"):
        compiler.offered("+compiled", captured(job()))
        compiler.start()
        compiler.wait()
        assert compiler.take() == {}
    compiler.close()
    (record,) = (each for each in caplog.records if "+compiled" in each.getMessage())
    return record.getMessage()


def test_a_compiling_process_that_ends_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert "the compiling process ended with 1" in failure_of(FormCompiler(tmp_path), caplog)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "compiled steps cannot be kept" in failure_of(FormCompiler(file / "folder"), caplog)


@pytest.mark.slow  # imports all of Inductor for nothing
def test_without_a_compiler_there_is_no_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "has no form '+compiled'" in failure_of(FormCompiler(tmp_path), caplog)


@pytest.mark.parametrize(
    ("compute", "has_layouts"),
    [
        (lambda x, y: F.scaled_dot_product_attention(x, x, x).square().sum(), False),
        (lambda x, y: (x * 2).permute(0, 2, 1, 3).softmax(-1), False),
        (lambda x, y: F.conv2d(x, y).relu(), True),
    ],
    ids=["attention", "permuted", "convolution"],
)
def test_graphs_without_convolutions_keep_their_layout(compute: Callable[[Any, Any], Any], has_layouts: bool) -> None:
    """As the graph of a compiled model: its tensors of four dimensions are its batch."""
    batch = [torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)]

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compute(*batch)

    captured_step = capture_step(step, [], [], batch, split=False)
    made = rewritten_forms(("", captured_step), None)
    assert any("channels-last" in form for form in made) == has_layouts
