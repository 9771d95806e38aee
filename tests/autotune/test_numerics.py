"""``numerics="close"``: rewritten forms are tried, taken where they win, remembered, audited; left out if not close."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from autotune.driver import searched
from hocket.autotune.audit import Auditor
from hocket.autotune.candidate import SampledForms, TimedStep
from hocket.autotune.runner import RefusedError
from hocket.backends import CpuBackend
from hocket.errors import CaptureError, InputError
from hocket.session import Schedule
from support.steps import training_step

CONV_FORMS = ("+fused-update", "+channels-last+fused-update", "+channels-last+fused-norm+fused-update")


def job(*further: nn.Module) -> hocket.Job:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), *further, nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(8 * 36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [(torch.randn(4, 3, 6, 6), torch.randint(0, 10, (4,))) for _ in range(3)]
    step = training_step(model, optimizer)
    return hocket.Job(step, model, optimizer, batches)


def rewritten_is_faster(item: TimedStep) -> float:
    """Eager and plans of the plain form take 10 ms, those of a rewritten one 5."""
    targets = {op.target for op in item.executor.captured.graph.ops} if item.executor else set()
    return 5.0 if "aten._fused_sgd_" in targets else 10.0


def test_what_is_not_asked_for_is_not_tried() -> None:
    decision, items = searched(job(), rewritten_is_faster)
    assert not any(isinstance(item, SampledForms) for item in items)
    assert all(candidate.form == "" for candidate in decision.candidates)


def test_a_form_that_wins_is_taken_and_met_again(tmp_path: Any) -> None:
    decision, items = searched(job(), rewritten_is_faster, cache=tmp_path, numerics="close")
    assert decision.kind == "planned"
    assert decision.best is not None
    assert decision.best.form in CONV_FORMS
    assert decision.best.plain is not None
    assert f"by {decision.best.form!r}" in decision.reason
    assert sum(isinstance(item, SampledForms) for item in items) >= 3
    again, _ = searched(job(), rewritten_is_faster, cache=tmp_path, numerics="close")
    assert again.is_recalled
    assert again.best is not None
    assert again.best.form == decision.best.form
    bitwise, _ = searched(job(), rewritten_is_faster, cache=tmp_path)
    assert not bitwise.is_recalled


def test_a_form_that_is_slower_is_not_taken() -> None:
    def slower(item: TimedStep) -> float:
        return {5.0: 20.0, 10.0: 10.0 if item.executor is None else 8.0}[rewritten_is_faster(item)]

    decision, _ = searched(job(), slower, numerics="close")
    assert decision.best is not None
    assert decision.best.form == ""


class Viewed(nn.Module):
    """A view that images whose channels come last do not have; after it what is written into it is read, or not."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        values = x.view(x.shape[0], -1)
        if not self.writes:
            return values
        values.add_(1.0)
        return x.reshape(x.shape[0], -1)


def test_a_view_that_needs_its_layout_is_one_of_a_copy() -> None:
    decision, _ = searched(job(Viewed()), rewritten_is_faster, numerics="close")
    assert any("channels-last" in candidate.form for candidate in decision.candidates)


def test_a_write_that_such_a_copy_loses_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hocket"):
        decision, _ = searched(job(Viewed(writes=True)), rewritten_is_faster, numerics="close")
    assert {candidate.form for candidate in decision.candidates} <= {"", "+fused-update"}
    assert "'+channels-last+fused-update' is left out" in caplog.text


def test_user_code_that_looks_at_the_layout_sees_that_of_eager() -> None:
    class Dense(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_contiguous():
                raise RuntimeError("channels have to come first")
            return x

    decision, _ = searched(job(Dense()), rewritten_is_faster, numerics="close")
    assert any("channels-last" in candidate.form for candidate in decision.candidates)


def test_a_step_without_float64_kernels_has_its_plain_form_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacking(*_: Any) -> Any:
        raise RuntimeError('"kernel" not implemented for Double')

    monkeypatch.setattr("hocket.autotune.closeness.float64_step", lacking)
    with caplog.at_level(logging.INFO, "hocket"):
        decision, _ = searched(job(), rewritten_is_faster, numerics="close")
    assert {candidate.form for candidate in decision.candidates} <= {""}
    assert "'+fused-update' is left out: there is no float64 step to compare with" in caplog.text


def audited_forms(wrong: bool) -> tuple[list[RefusedError | None], hocket.Job]:
    """Results of eight audits in a row of a rewritten form. Those of a `wrong` one meet a rate of half the size."""
    made = job()
    decision, _ = searched(made, rewritten_is_faster, numerics="close")
    assert decision.best is not None
    best, optimizer = decision.best, made.optimizers[0]
    executor = best.executor

    class Halved:
        def __call__(self, batch: Any) -> Any:
            optimizer.param_groups[0]["lr"] *= 0.5
            try:
                return executor(batch)
            finally:
                optimizer.param_groups[0]["lr"] *= 2

    if wrong:
        best = replace(best, executor=Halved())  # type: ignore[arg-type]
    auditor = Auditor(CpuBackend(hocket.Machine.of(cores=1), "auto"), lambda: 0.0)
    problems = [auditor.step(best, made.batch(number), made.step)[1] for number in range(8)]
    executor.close()
    return problems, made


def test_audits_judge_by_the_same_rule() -> None:
    problems, _ = audited_forms(wrong=False)
    assert problems == [None] * 8


def test_an_audit_finds_a_form_that_goes_wrong_later() -> None:
    problems, made = audited_forms(wrong=True)
    assert any("does not compute what eager computes" in str(problem) for problem in problems)
    assert made.optimizers[0].param_groups[0]["lr"] == 0.05


def test_an_audit_that_could_not_be_made_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise CaptureError("a step in float64 takes more memory than there is")

    monkeypatch.setattr("hocket.autotune.closeness.expect_room", no_room, raising=True)
    made = job()
    decision, _ = searched(made, lambda item: 1.0)
    assert decision.candidate is not None
    captured = decision.candidate.captured
    best = replace(decision.candidate, plain=captured)
    auditor = Auditor(CpuBackend(hocket.Machine.of(cores=1), "auto"), lambda: 0.0)
    auditor.audit.counts()
    result, problem = auditor.step(best, made.batch(0), made.step)
    assert problem is None
    assert isinstance(result, torch.Tensor)
    assert auditor.audit.num_done == 1


def test_numerics_are_checked() -> None:
    made = job()
    with pytest.raises(InputError, match="unknown numerics 'fast'; available: bitwise, rounding, close"):
        Schedule(made.step, made.model, made.optimizer, numerics="fast")
