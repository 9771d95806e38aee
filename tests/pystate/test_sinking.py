"""Statements before a backward come after the update only if they have to do with no weight, gradient or rate."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.pystate.apart import addresses_of
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.parts import split

MODEL = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
WEIGHT = MODEL[0].weight.detach().numpy()[1:]
SHARES = np.ones(6, dtype=np.float32)
SCALE = [1.0]
KEPT: list[Any] = []
COUNTS = {"hits": 0, "steps": 0}


class Reverse(torch.autograd.Function):
    """Its backward is the user's code."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * SCALE[0]


class Tracker:
    """It knows the model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def note(self, value: float) -> None:
        model = self.model() if isinstance(self.model, weakref.ref) else self.model
        KEPT.append((value, model[0].weight.norm().item()))


class Lazy:
    """It comes to the model by a property that is kept."""

    @cached_property
    def norm(self) -> float:
        return norm_of_weights()

    def note(self, value: float) -> None:
        KEPT.append((value, self.norm))


class Table:
    """It stores by keys."""

    def __init__(self) -> None:
        self.latest: dict[Any, Any] = {}

    def keep(self, key: Any, value: Any) -> None:
        self.latest[key] = value

    def keep_in(self, holder: Any, value: float) -> None:
        holder.t[0] = value


TABLE = Table()
COUNTER = SimpleNamespace(step=1)
TRACKER, WEAK, LAZY = Tracker(MODEL), Tracker(weakref.ref(MODEL)), Lazy()


def norm_of_weights() -> float:
    return MODEL[0].weight.norm().item()


def norm_by_name() -> float:
    return globals()["MODEL"][0].weight.norm().item()


def gradient_by_name(x: torch.Tensor) -> Any:
    return getattr(x, "gr" + "ad")


def zero_first(array: Any) -> None:
    array[0] = 0


def train(loss: torch.Tensor) -> None:
    OPTIMIZER.zero_grad()
    loss.backward()
    OPTIMIZER.step()


# The statement that stands before the backward, and names for it by another one before that.
STAYS = {
    "an attribute of the model": ("", "KEPT.append(MODEL[0].weight.norm().item())"),
    "a local name of a weight": ("w = MODEL[0].weight", "KEPT.append(w.norm().item())"),
    "its memory": ("w = MODEL[0].weight.detach()", "KEPT.append(w.sum().item())"),
    "its memory by numpy": ("", "KEPT.append(float(WEIGHT.sum()))"),
    "a name bound anew": ("w = MODEL[0].weight", "w = w.norm().item()"),
    "a list of weights": ("ws = list(MODEL.parameters())", "KEPT.append([w.norm().item() for w in ws])"),
    "a weight in a dict": ("aux = {'w': MODEL[0].weight}", "KEPT.append(aux['w'].norm().item())"),
    "a helper that reads weights": ("", "KEPT.append(norm_of_weights())"),
    "a helper that looks up a name": ("", "KEPT.append(norm_by_name())"),
    "a helper that computes a name": ("", "KEPT.append(gradient_by_name(x) is None)"),
    "an object with the model": ("", "TRACKER.note(loss.item())"),
    "a weak reference to it": ("", "WEAK.note(loss.item())"),
    "a property that reads weights": ("", "LAZY.note(loss.item())"),
    "a rate": ("", "OPTIMIZER.param_groups[0]['lr'] = 0.1 * loss.item()"),
    "an attribute of a model": ("", "MODEL.last = loss.item()"),
    "a gradient": ("x = x.clone().requires_grad_()", "KEPT.append(x.grad is None)"),
    "a write by an index": ("", "x.numpy()[0] = 0"),
    "a write into an array that is read": (
        "w = torch.from_numpy(SHARES[2:5])",
        "SHARES[3] = loss.item()",
    ),
    "a write in a helper": ("", "zero_first(x.numpy())"),
    "a write by a method": ("", "out.detach().clamp_(max=loss.item())"),
    "a write by numpy": ("", "x.numpy().sort()"),
    "a write by an operator": ("h = x.numpy()", "h += loss.item()"),
    "what the backward begins with": ("", "loss = loss * loss.item()"),
    "a clock by its name": ("begin = perf_counter()", "KEPT.append((perf_counter() - begin, loss.item()))"),
    "names of all": ("", "KEPT.append((globals()['MODEL'][0].weight.sum().item(), loss.item()))"),
    "the clock": ("begin = time.time()", "KEPT.append((time.time() - begin, loss.item()))"),
    "a write by an object": ("", "TABLE.keep(0, x.numpy())"),
    "a write by an object that holds it": ("h = SimpleNamespace(t=x.clone())", "TABLE.keep_in(h, loss.item())"),
    "a return": ("", "if loss.item() > 1e9: return None"),
    "an error": ("", "assert loss.item() < 1e9"),
}
MOVES = {
    "hits": ("", "COUNTS['hits'] += (out.argmax(1) == y).sum().item()"),
    "predictions": ("", "KEPT.extend(out.argmax(1).tolist())"),
    "numpy": ("", "KEPT.append(out.detach().numpy().mean().item())"),
    "a write into an array": ("", "SHARES[y.numpy()] = out.detach().numpy().max(1)"),
    "a branch": ("", "if COUNTS['steps'] % 2: KEPT.append(loss.item())"),
    "a loop": ("", "for each in out.argmax(1).tolist(): KEPT.append(each)"),
    "draws": ("", "KEPT.append((loss.item(), random.random(), torch.rand(1).item()))"),
    "a count named step": ("step = 3", "KEPT.append((step, COUNTER.step, loss.item()))"),
    "an object that stores": ("", "TABLE.keep('loss', (loss.item(), out.detach().cpu().sum().item()))"),
    "no gradient": ("", "with torch.no_grad(): KEPT.append((out * 2).sum().item())"),
}
STEP = """
def step(x, y):
    {before}
    out = MODEL(x)
    loss = F.cross_entropy(out, y)
    {statement}
    {training}
    return loss.detach()
"""
TRAINING = "OPTIMIZER.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0); OPTIMIZER.step()"


@pytest.fixture
def step_of(tmp_path, monkeypatch) -> Callable[..., Any]:
    """A step with one statement before its training, in a file, with the globals of this module."""

    def make(before: str, statement: str, training: str = TRAINING) -> Any:
        file = tmp_path / f"step{len(list(tmp_path.iterdir()))}.py"
        file.write_text(STEP.format(before=before or "pass", statement=statement, training=training))
        space = {**globals(), "F": F, "random": random, "time": time, "perf_counter": time.perf_counter}
        exec(compile(file.read_text(), str(file), "exec"), space)
        return space["step"]

    return make


def is_moved(step: Callable[..., Any]) -> bool:
    executed = ExecutedCode()
    for _ in range(2):
        with executed.watching():
            step(torch.randn(5, 4), torch.randint(3, (5,)))
    return any(parts.passed for parts in split(step, executed.lines, addresses_of([MODEL, OPTIMIZER])))


@pytest.mark.parametrize("case", MOVES)
def test_statements_about_outputs_may_come_after_the_update(step_of, case):
    assert is_moved(step_of(*MOVES[case]))


@pytest.mark.parametrize("case", STAYS)
def test_statements_stay_where_training_could_meet_them(step_of, case):
    assert not is_moved(step_of(*STAYS[case]))


def test_what_stores_elements_may_come_after_an_update_and_not_after_a_backward(step_of):
    stores = "TABLE.keep(0, out.detach().numpy())"
    assert not is_moved(step_of("", stores))
    assert is_moved(step_of("", "pass", f"loss.backward(); {stores}; OPTIMIZER.step()"))


def test_statements_may_come_after_the_mean_of_a_loss(step_of):
    assert is_moved(step_of(*MOVES["numpy"], f"loss = loss.mean() + out.sum() / 9; {TRAINING}"))


@pytest.mark.parametrize(
    "training",
    [
        "train(loss)",  # any code could be in it
        "loss.backward(); nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0, error_if_nonfinite=True); OPTIMIZER.step()",
        "loss /= 2; loss.backward(); OPTIMIZER.step()",
        "loss.backward(); COUNTS['steps'] += 1; OPTIMIZER.step() if COUNTS['steps'] % 2 else None",
    ],
)
def test_other_statements_are_not_passed(step_of, training):
    assert not is_moved(step_of(*MOVES["hits"], training))


def test_a_count_is_not_moved_behind_the_branch_that_asks_for_it(step_of):
    training = "loss.backward()\n    if COUNTS['hits'] % 2 == 0:\n        OPTIMIZER.step()"
    assert not is_moved(step_of(*MOVES["hits"], training))
    assert is_moved(step_of(*MOVES["predictions"], training))


def test_a_hook_or_a_function_of_the_users_in_the_backward_keeps_statements_in_place(step_of):
    step = step_of(*MOVES["numpy"])
    handle = MODEL[2].register_full_backward_hook(lambda *_: None)
    assert not is_moved(step)
    handle.remove()
    handle = OPTIMIZER.register_step_post_hook(lambda *_: None)
    assert not is_moved(step)
    handle.remove()
    assert is_moved(step)
    assert not is_moved(step_of("x = Reverse.apply(x.clone().requires_grad_())", MOVES["numpy"][1]))
