"""Steps that were once refused for a reason that was none: what carries over, modes, warnings, rates by the step."""

import argparse
import contextlib
import math
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from loops import holders
from quick import covering
from support.steps import update
from support.twins import Program, captured, ran


def parts(*layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(layers or (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, 6)


# ------------------------------------------------------------------------------------ state that is carried over

Hidden = namedtuple("Hidden", "h c")


def global_variable(first: Any) -> holders.Made:
    module: dict[str, Any] = {"state": first}
    exec("def read():\n    return state\ndef write(value):\n    global state\n    state = value", module)
    return module["read"], module["write"]


PLACES = ("item of a dict", "namespace", "slot", "attribute of a class", "cell", "item of a list")
HOLDERS = {**{name: holders.HOLDERS[name] for name in PLACES}, "global": global_variable}


@pytest.mark.parametrize(
    ("place", "kind"),
    covering(HOLDERS, [tuple, list, lambda pair: Hidden(*pair), lambda pair: {"h": pair[0], "c": pair[1]}]),
)
def test_the_hidden_state_of_a_network_is_bound_anew_as_a_tuple(place, kind):
    def make() -> Program:
        net, head = nn.LSTM(4, 5), nn.Linear(5, 2)
        model = nn.ModuleList([net, head])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        read, write = HOLDERS[place](kind((torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))))

        def step(batch: torch.Tensor) -> torch.Tensor:
            found = read()
            optimizer.zero_grad()
            out, (h, c) = net(batch, tuple(found.values()) if isinstance(found, dict) else tuple(found))
            write(kind((h.detach(), c.detach())))
            loss = head(out).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, model, optimizer)

    captured(make, lambda number: torch.randn(7, 3, 4))


# --------------------------------------------------------------------------------------------- modes of modules


@pytest.mark.parametrize("within", [False, True], ids=["evaluated outside", "evaluated inside"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "one layer"])
def test_a_step_may_set_the_mode_that_other_code_sets_back(within, part):
    def make() -> Program:
        model, optimizer = parts(nn.Linear(6, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 3))
        target = model[2] if part else model

        def step(batch: torch.Tensor) -> torch.Tensor:
            target.train()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if within:
                target.eval()
            return loss.detach()

        def evaluate(number: int) -> None:
            target.eval()
            with torch.no_grad():
                model(torch.ones(4, 6))

        return Program(step, model, optimizer, evaluate if not within else lambda number: None)

    captured(make, inputs)


# ----------------------------------------------------------------------------------------------------- warnings


def plain(warns: bool = False, between: bool = False) -> Any:
    def make() -> Program:
        model, optimizer = parts()

        def step(batch: torch.Tensor) -> torch.Tensor:
            if warns:
                warnings.warn("an old call", stacklevel=1)
            return update(optimizer, model(batch).square().mean()).detach()

        def warn(number: int) -> None:
            if between:
                warnings.warn("one at least", stacklevel=1)

        return Program(step, model, optimizer, warn)

    return make


@pytest.mark.parametrize("between", [False, True], ids=["silent", "warned of between steps"])
@pytest.mark.parametrize(
    "recording",
    [lambda: warnings.catch_warnings(record=True), lambda: pytest.warns(UserWarning, match="one at least")],
    ids=["ours", "pytest"],
)
def test_a_loop_whose_warnings_are_recorded_is_planned(recording, between):
    with recording():
        warnings.simplefilter("always")
        warnings.warn("one at least", stacklevel=1)
        captured(plain(between=between), inputs)


def test_a_step_that_catches_warnings_itself_is_planned():
    def make() -> Program:
        made = plain()()
        inner = made.step

        def step(batch: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return inner(batch)

        made.step = step
        return made

    captured(make, inputs)


def test_a_step_that_warns_each_time_warns_as_often_and_says_where():
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fast = ran(plain(warns=True), inputs, 20)
    assert sum("an old call" in str(each.message) for each in recorded) == 40
    assert fast.verdict == "planned"


# ----------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("again", ["twice", "tied", "three times"])
@pytest.mark.parametrize("where", ["made inside", "made outside"])
def test_a_weight_that_one_context_of_autocast_casts_once(again, where):
    def make() -> Program:
        model, optimizer = parts(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        if again == "tied":
            model[2].weight = model[0].weight
        outside = torch.autocast("cpu", dtype=torch.bfloat16)

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            context = outside if where == "made outside" else torch.autocast("cpu", dtype=torch.bfloat16)
            with context:
                out = model(batch)
                if again != "tied":
                    out = out.float().square() + model(batch * 0.5).float().abs()
                if again == "three times":
                    out = out + model(batch + 1)
                loss = out.float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, model, optimizer)

    captured(make, inputs)


def test_a_context_of_autocast_is_nothing_at_all_on_a_plain_run():
    """As nanoGPT has it: a null context or one of autocast, chosen once."""

    def make() -> Program:
        model, optimizer = parts()
        context = contextlib.nullcontext()

        def step(batch: torch.Tensor) -> torch.Tensor:
            with context:
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return Program(step, model, optimizer)

    captured(make, inputs)


# --------------------------------------------------------------------------------- a rate that goes by the step


def cosine(number: int) -> float:
    return 0.01 + 0.5 * (1.0 + math.cos(math.pi * number / 500)) * 0.09


def warm_up_and_cosine(number: int) -> float:
    if number < 6:
        return 0.1 * (number + 1) / 7
    if number > 500:
        return 0.01
    ratio = (number - 6) / 494
    assert 0 <= ratio <= 1
    return 0.01 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * 0.09


def staircase(number: int) -> float:
    return 0.1 * 0.5 ** (number // 10)


class Counter:
    number = 0


@pytest.mark.parametrize(
    ("rate", "place"),
    covering(
        [cosine, warm_up_and_cosine, staircase],
        ["argument", "keyword", "global", "dict", "attribute", "counted inside"],
    ),
)
def test_a_rate_that_the_step_computes_from_its_number_is_read_anew(rate, place):
    def make() -> Program:
        model, optimizer = parts()
        state = {"number": 0}
        arguments = argparse.Namespace(number=0)
        module: dict[str, Any] = {"iter_num": 0}
        read_global = eval("lambda: iter_num", module)

        def step(batch: torch.Tensor, number: int = 0) -> torch.Tensor:
            if place == "global":
                number = read_global()
            elif place in ("dict", "counted inside"):
                number = state["number"]
            elif place == "attribute":
                number = arguments.number
            for group in optimizer.param_groups:
                group["lr"] = rate(number)
            loss = model(batch).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if place == "counted inside":
                state["number"] += 1
            return loss.detach()

        def count(number: int) -> None:
            module["iter_num"] = arguments.number = number
            if place != "counted inside":
                state["number"] = number

        one = Program(step, model, optimizer, count)
        if place == "keyword":
            one.step = lambda batch: step(batch["x"], number=batch["number"])
        return one

    def batch(number: int) -> Any:
        if place == "argument":
            return inputs(number), number
        return {"x": inputs(number), "number": number} if place == "keyword" else inputs(number)

    fast = captured(make, batch, 40)
    assert fast.verdict == "planned", fast.why
    assert len(fast._pool.active._recent) <= 4, (
        "one for each way that the rate's branches go, and one while there are no gradients"
    )
