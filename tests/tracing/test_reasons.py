"""Every reason for staying eager names the user's line, the object and a cure. A step that is cured is planned."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.autotune import admission
from hocket.pystate.findings import FINDINGS
from hocket.tracing.reasons import REASONS
from support.refusals import line_at_fault
from support.steps import update
from support.twins import Program, captured, ran
from tracing import refused_states, refused_steps

BODIES = {**vars(refused_steps), **vars(refused_states)}


@dataclasses.dataclass
class Case:
    """One reason.

    Attributes:
        about: the object, in the user's words.
        batch: of the step.
        cured_batch: of the cured one, where it is another.
    """

    about: str = ""
    batch: Callable[[int], Any] = lambda number: torch.randn(4, 6)
    cured_batch: Callable[[int], Any] | None = None


def array(number: int) -> Any:
    return np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32)


CASES = {
    "reads a value": Case("int reads a tensor's value"),
    "looks for nan": Case("set_detect_anomaly"),
    "reads a rate": Case("the values of tensors"),
    "reads many values": Case("2400 values"),
    "makes a shape of values": Case("aten::index"),
    "leaves torch": Case("numpy"),
    "replaces memory": Case("gives a tensor other memory"),
    "computes with an array": Case("with a numpy array", array),
    "uses a late number": Case("the value of a tensor"),
    "keeps a number early": Case("before an op that may raise"),
    "catches an error": Case("may catch what an op raises"),
    "goes on after an error": Case("nll_loss_forward"),
    "computes unseen": Case("cross_entropy_loss"),
    "computes otherwise": Case("calls prod"),
    "sets random state": Case("torch.manual_seed"),
    "draws from a generator": Case("aten::rand"),
    "moves memory": Case("aten::resize_"),
    "uses a layout": Case("torch.sparse_coo"),
    "wraps tensors": Case(r"optimizer\.group0\.4, a TwoTensor"),
    "shares memory unseen": Case(r"of shape \(4, 6\)"),
    "calls functions": Case("an op that calls functions"),
    "makes state": Case(r"optimizer\.0\.weight\.more"),
    "calls a sink": Case("neither number nor text"),
    "sets a value": Case(r"table\['loss'\]"),
    "counts in an op": Case(r"COUNTED\['n'\] to \d"),
    "returns unseen": Case("builtins.set"),
    "returns replaced": Case("list or dict"),
    "returns attributes": Case(r"a tensor of shape \(\) with an attribute 'tag'"),
    "returns a graph": Case(r"a tensor of shape \(4, 3\)"),
    "retains a gradient": Case(r"a tensor of shape \(4, 3\)"),
    "trains unseen": Case(r"a tensor of shape \(6,\)", refused_steps.with_another_code),
    "trains its batch": Case(r"a tensor of shape \(4, 6\) of its batch"),
    "batch unseen": Case("builtins.set", lambda n: [torch.randn(4, 6), {1}], lambda n: [torch.randn(4, 6), [1]]),
    "reads an appended list": Case(r"table\['list'\]"),
    "runs no ops": Case("ops"),
    "draws": Case("the state of random"),
    "advances": Case("numbers, a range_iterator"),
    "keeps a graph": Case(r"table\['kept'\]"),
    "counts": Case(r"table\['deque'\]\[0\] \(\d -> \d\)"),
    "hands on": Case(r"table\['n'\] \(\d -> \d\), and hands numbers to datetime"),
    "grows": Case(r"table\['names'\]"),
    "writes an array": Case(r"table\['array'\]"),
    "exchanges": Case(r"table\['object'\]"),
    "refills": Case(r"table\['stats'\] \(a dict -> a dict\)"),
    "marks a tensor": Case(r"0\.weight\.hooks \(\(.*\) -> \(.*\)\)"),
}


def function_of(kind: str) -> Any:
    return BODIES[kind.replace(" ", "_")]


def program(body: Any) -> Callable[[], Program]:
    """The body as a step. Its parts are reached as the user's objects are, by a closure."""

    def make() -> Program:
        parts = refused_steps.Parts()

        def step(batch: Any) -> Any:
            return [body(parts, batch)][0]  # no call whose parts would be found

        step.__wrapped__ = body  # type: ignore[attr-defined]
        return Program(step, parts.model, parts.optimizer)

    return make


def test_every_reason_has_a_case():
    elsewhere = {"steps a scheduler", "reads a scaler"}  # see test_refusals, and streams/test_strict_optimizers
    assert {*CASES, *elsewhere} == {*REASONS, *FINDINGS}


@pytest.mark.parametrize("kind", CASES)
def test_a_reason_names_the_line_the_object_and_a_cure(kind, monkeypatch):
    monkeypatch.setattr(admission, "MAX_IDLE", 1)  # a step that runs no ops is not waited for
    case, body = CASES[kind], function_of(kind)
    make = program(body)
    fast = ran(make, case.batch, 18)
    assert fast._pool.current.captured is None
    table = REASONS if kind in REASONS else FINDINGS
    cures = [known[kind][1] for known in (REASONS, FINDINGS) if kind in known]
    assert any(cure in fast.why for cure in cures), fast.why
    assert table[kind][1]
    assert re.search(case.about, fast.why), fast.why
    assert line_at_fault(body) in fast.why, fast.why


@pytest.mark.parametrize("kind", [kind for kind in CASES if f"{kind.replace(' ', '_')}_cured" in BODIES])
def test_the_cure_is_planned(kind):
    case = CASES[kind]
    fast = captured(program(function_of(f"{kind} cured")), case.cured_batch or case.batch)
    assert fast._pool.current.difference is not None


@pytest.mark.parametrize(
    ("kind", "about"),
    [
        ("asks the clock", r"the clock \(time\)"),
        ("asks the system", r"os\.path\.exists"),
        ("draws by numpy", r"^it advances the state of numpy\.random: draw with torch's default generator[^;]*$"),
        ("draws by its own generator", r"^it advances [^;]*OWN, a Generator: draw[^;]*$"),
    ],
)
def test_what_is_asked_is_named_as_the_user_calls_it(kind, about):
    body = function_of(kind)
    parts = refused_steps.Parts()
    step = lambda batch: [body(parts, batch)][0]  # noqa: E731  # no call whose parts would be found
    fast = hocket.schedule(step, parts.model, parts.optimizer, guard=False, cache=False)
    for _ in range(12):
        fast(torch.randn(4, 6))
    assert re.search(about, fast.why), fast.why
    assert line_at_fault(body) in fast.why


def test_a_compiled_model_is_not_refused_for_what_its_compiler_does():
    def make() -> Program:
        model = torch.compile(nn.Linear(6, 3), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor) -> torch.Tensor:
            return update(optimizer, model(batch).square().mean()).detach()

        return Program(step, model, optimizer)

    captured(make, lambda number: torch.randn(4, 6))
