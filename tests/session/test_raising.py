"""A step that raises, or whose loss is no number, before the verdict and after it."""

import itertools
import math
from typing import Any

import pytest
import torch

import hocket
from execution.probe import KINDS, probing_job
from hocket.autotune.verification import differ
from loops.loop import Loop
from loops.runner import compared
from quick import covering, some
from support.schedules import decide, pass_audits, state, twin
from support.twins import Program, ran

pytestmark = pytest.mark.usefixtures("one_core")


def test_an_error_in_the_step_reaches_the_caller_and_the_schedule_survives() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial", guard=False)
    inputs, targets = job.batch(0)
    decide(fast, job)
    fast(job.batch(0))
    pass_audits(fast, job)
    wrong = targets.clone()
    wrong[0] = 10_000
    with pytest.raises(IndexError) as caught:
        fast((inputs, wrong))
    assert any("nll_loss_forward" in note for note in caught.value.__notes__)
    captured = fast.captured
    for _ in range(3):
        assert torch.isfinite(fast((inputs, targets)))
        assert fast.decided, "one step without gradients is no reason to begin anew"
    assert fast.captured is captured


class Counting:
    """A step that writes a buffer and counts before an op that may raise, after it, and behind another one.

    Args:
        draws: draw random numbers first.
    """

    def __init__(self, draws: bool) -> None:
        torch.manual_seed(0)
        self.words, self.norm, self.head = torch.nn.Embedding(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        self.model = torch.nn.ModuleList([self.words, self.norm, self.head])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.table = {"begun": 0, "between": 1.5, "late": 0, "stage": "none"}
        self.draws = draws

    def step(self, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, words, targets = batch
        self.optimizer.zero_grad()
        self.table["begun"] += 1
        self.table["stage"] = "inputs"
        hidden = self.norm(torch.dropout(inputs, 0.5, True) if self.draws else inputs)
        if bool(inputs[0, 0] > 1e6):
            raise ValueError("too large")
        hidden = hidden + self.words(words)
        self.table["between"] = self.table["between"] * 0.5 + self.table["begun"]
        self.table["stage"] = "loss"
        loss = torch.nn.functional.cross_entropy(self.head(hidden), targets)
        self.table["late"] += 1
        self.table["stage"] = "end"
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def batch(self, number: int, fault: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(4, 6, generator=generator)
        words, targets = (torch.randint(0, n, (4,), generator=generator) for n in (8, 3))
        if fault == "inputs":
            inputs[0, 0] = 1e7
        elif fault:
            {"words": words, "targets": targets}[fault][1] = 99
        return inputs, words, targets

    def loop(self, fault: str) -> Loop:
        faulty, tables = (1, 3, 5, 9, 43, 44, 50, 57), []

        def batch(n: int) -> Any:
            return self.batch(n, fault if n in faulty else "")

        def after(*_: Any) -> None:
            tables.append(dict(self.table))

        return Loop(self.step, self.model, self.optimizer, batch, lambda: {"tables": tables}, after)


@pytest.mark.parametrize(
    ("fault", "options", "planner", "draws"),
    covering(
        ["inputs", "words", "targets"],
        some(itertools.product([{}, {"guard": False}, {"numerics": "close"}], ["serial", "list"], [False, True]), 3),
    ),
)
def test_what_the_step_did_before_an_op_raised_stays_done(options, fault: str, planner: str, draws: bool) -> None:
    options = {"planner": planner, "cache": False, **options}
    is_exact = "numerics" not in options
    compared(lambda: Counting(draws).loop(fault), options, steps=60, counted=False, exact=is_exact, marked=1)


@pytest.mark.parametrize(("first", "kind"), covering([0, 1, 4, 20], KINDS))
def test_a_loss_that_is_no_number_is_no_number_by_plan_too(kind: str, first: int) -> None:
    eager, planned = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, planner="serial", guard=False, executor=kind)
    for number in range(25):
        inputs, targets = eager.batch(number)
        if number >= first:
            inputs = torch.full_like(inputs, math.nan)
        one, other = eager.step((inputs, targets)), fast((inputs, targets))
        assert one.isnan() == other.isnan() == (number >= first)
    assert fast.verdict == "planned", fast.why
    found = differ(state(eager), state(planned))
    assert found.equal, found
    fast.close()


@pytest.mark.parametrize(("calls", "kind"), covering([1, 3, 50], KINDS))
def test_an_op_that_raises_is_named_with_its_layer_wherever_the_step_is_in_its_life(kind: str, calls: int) -> None:
    torch.manual_seed(0)
    job = probing_job(2)
    options = {"planner": "list", "guard": False, "executor": kind}
    fast = hocket.schedule(job.step, job.model, job.optimizer, **options)
    for _ in range(calls):
        fast(job.batch(0))
    assert fast.decided == (calls == 50)
    for _ in range(2):
        pass_audits(fast, job)
        with pytest.raises(IndexError, match="out of range") as caught:
            fast((torch.tensor([0, 2, 7, 1]),))
        notes = getattr(caught.value, "__notes__", [])
        if calls == 3:  # in the midst of profiling: it begins anew, and the second time is an eager step
            assert fast.decided is False
        elif calls == 50:
            assert notes == ["in op 'words/embedding' of layer 'words' of the planned step"]
        fast(job.batch(1))
    for _ in range(50):
        assert torch.isfinite(fast(job.batch(0)))
    assert fast.verdict == "planned"
    fast.close()


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x


CHECKED = {
    "singular inverse": lambda h, x: (torch.linalg.inv(x[:4]) * h.sum()).sum(),
    "singular system": lambda h, x: torch.linalg.solve(x[:4], h[:4]).sum(),
    "no decomposition": lambda h, x: torch.linalg.cholesky(_squares(x)).sum() * h.sum(),
    "unread entropy": lambda h, x: torch.nn.functional.binary_cross_entropy(h.sigmoid(), x.abs()),
    "unread item": lambda h, x: (torch.arange(4.0)[x[:, 0].long().abs()], h.square().mean())[1],
    "unread row": lambda h, x: (x.gather(1, x[:, :1].long().abs()), h.square().mean())[1],
    "unread check": lambda h, x: (_checked(x), h.square().mean())[1],
}


@torch.library.custom_op("raising::checked", mutates_args=())
def _checked(x: torch.Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError("not finite")


def checked_batch(number: int) -> torch.Tensor:
    """Two batches late in the loop have values that some of the ops refuse."""
    x = torch.rand(6, 4)
    return x * torch.nan if number == 20 else x * 0 + 60 if number == 21 else x


@pytest.mark.parametrize("name", CHECKED)
def test_an_op_that_only_checks_raises_by_plan_too(name: str) -> None:
    """The step returns nothing, so that what the op computes is not read."""

    def make() -> Program:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            CHECKED[name](model(x), x).backward()
            optimizer.step()

        return Program(step, model, optimizer, raises=(ValueError, IndexError, RuntimeError))

    assert ran(make, checked_batch, 24).verdict == "planned"
    with pytest.raises((ValueError, IndexError, RuntimeError)):  # one of them at least
        [CHECKED[name](torch.ones(6, 4), checked_batch(number)) for number in (20, 21)]


SCALES = {
    "product": lambda k, j: j * k,
    "sum": lambda k, j: k + j,
    "order": lambda k, j: float(k < j) + k,
    "power": lambda k, j: k**j,
}


@pytest.mark.parametrize("other", ["x", None, [1.0], b"x", {}], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("use", SCALES)
def test_number_beside_what_is_none_raises_once_and_as_in_eager(use, other):
    """Also in the call that is recorded, whose numbers are followed: nothing is made twice for it."""

    def build() -> Loop:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = {"k": 0.5, "j": 0.25}

        def step(batch):
            loss = model(batch).square().mean() * SCALES[use](values["k"], values["j"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values["k"] *= 0.9
            return loss.detach()

        def batch(n):
            values["j"] = other if n in (3, 12) else 0.25
            return torch.ones(3, 4)

        return Loop(step, model, optimizer, batch, lambda: values)

    compared(build, {"cache": False, "machine": hocket.Machine.of(cores=1)}, steps=20, marked=1)
