"""A step in parts does what the step does, in the same order; where that cannot be told, there are no parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hocket.pystate.step_parts import BEFORE
from support.parted import in_parts, ways

WEIGHT = torch.ones(3)


def outcome(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, float]:
    random.seed(3)
    return call(), capsys.readouterr().out, random.random()


def prints(x: torch.Tensor) -> float:
    y = (x * WEIGHT).sum()
    value = y.item()
    print(f"{value:.3f}")
    del y
    return value


def draws(x: torch.Tensor) -> Any:
    rate, n = random.random(), len(x)
    y = x * random.uniform(1, 2) + rate
    total = y.sum()
    if (value := total.item()) > 1e9:
        return None
    print(n, value)
    return value, rate


def draws_when_it_likes(x: torch.Tensor) -> Any:
    scale = random.random() if len(x) > 2 else 1.0
    y = (x * scale).sum()
    print(scale)
    return y.item()


def binds_twice(x: torch.Tensor) -> Any:
    source = iter([None, x])
    batch = next(source)
    if batch is None:
        batch = next(source)
    y = (batch * WEIGHT).sum()
    print(y.item())


def scaled(number: float) -> float:
    return number * random.random()


def draws_after_a_function_that_calls_one(x: torch.Tensor) -> Any:
    y = x * 2
    (scale,) = torch.utils._pytree.tree_map(scaled, [0.5])
    rate = random.random()
    z = y.mul(rate)
    print(z.sum().item(), scale)


def declares(x: torch.Tensor) -> Any:
    global WEIGHT
    note: str
    y = x * WEIGHT
    WEIGHT = WEIGHT + 0
    note = f"{y.sum().item()}"
    print(note)
    return [each + note for each in note]


def names_again(x: torch.Tensor) -> Any:
    y = sum(p.pow(2).sum() for p in (x, x))
    kept = []
    for held, p in zip((y, y), (x, x), strict=True):
        kept.append((held.item(), len(p)))
    n = [n for n in kept]  # noqa: C416
    print(n, kept)
    return {p: held for p, held in enumerate(n)}  # noqa: C416


def trained(x: torch.Tensor) -> torch.Tensor:
    weight = WEIGHT.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (x * weight).sum().backward()
    optimizer.step()
    return weight.detach().sum()


def trains_in_its_return(x: torch.Tensor) -> Any:
    scale = random.random()
    return trained(x * scale)


@pytest.mark.parametrize(
    "step",
    [
        *(prints, draws, draws_when_it_likes, draws_after_a_function_that_calls_one, binds_twice, declares),
        *(names_again, trains_in_its_return),
    ],
)
def test_parts_one_after_the_other_are_the_step(step: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(3.0)
    found = ways(step, x)
    capsys.readouterr()
    assert found
    expected = outcome(lambda: step(x), capsys)
    for parts in found:
        assert outcome(lambda parts=parts: in_parts(parts, x), capsys) == expected  # type: ignore[misc]


def ends_early(x: torch.Tensor) -> Any:
    y = (x * WEIGHT).sum()
    if y > 5:
        return y.item(), "early"
    for each in x.tolist():
        if each < -1:
            return None
    z = y * 2
    print(z.item())
    return z


def ends_early_before_a_draw(x: torch.Tensor) -> Any:
    y = (x * WEIGHT).sum()
    if y > 5:
        return
    scale = random.random()
    z = y * scale
    print(z.item())


@pytest.mark.parametrize("x", [torch.ones(3), 2 * torch.ones(3), -2 * torch.ones(3)], ids=["whole", "first", "second"])
def test_a_middle_may_end_the_step(x: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    found = ways(ends_early, torch.ones(3))
    capsys.readouterr()
    assert found
    for parts in found:
        assert outcome(lambda parts=parts: in_parts(parts, x), capsys) == outcome(lambda: ends_early(x), capsys)  # type: ignore[misc]


FILLED: list[float] = []


def waits(x: torch.Tensor) -> Any:
    if len(FILLED) < 3:
        print("waiting")
        return "not yet", len(FILLED)
    scale = sum(random.sample(FILLED, 2))
    y = (x * scale).sum()
    print(y.item())
    return y


def test_what_comes_before_may_end_the_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.FILLED", [1.0, 2.0, 4.0])
    x = torch.ones(3)
    found = ways(waits, x)
    capsys.readouterr()
    assert found
    for filled in ([], [1.0, 2.0], [1.0, 2.0, 4.0, 8.0]):
        monkeypatch.setattr(f"{__name__}.FILLED", filled)
        expected = outcome(lambda: waits(x), capsys)
        for parts in found:
            assert outcome(lambda parts=parts: in_parts(parts, x), capsys) == expected  # type: ignore[misc]


def test_a_draw_after_what_may_end_the_step_stays_there(capsys: pytest.CaptureFixture[str]) -> None:
    for parts in ways(ends_early_before_a_draw, torch.ones(3)):
        assert parts.before is None


def test_the_middle_prints_and_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (parts, *_) = ways(draws, torch.ones(3))
    capsys.readouterr()
    state = random.getstate()
    live = parts.middle(torch.ones(3), **{BEFORE: (0.5, 1.5)})
    assert random.getstate() == state
    assert capsys.readouterr().out == ""
    assert any(isinstance(each, torch.Tensor) or each == 6.0 for each in live)


def bound_by_an_assignment_within(x: torch.Tensor) -> Any:
    y = len(x) > 5 and (z := x.sum()) is not None
    w = x.square()
    if y:
        print(z)
    return w.sum().item()


def bound_perhaps(x: torch.Tensor) -> None:
    if len(x) > 5:
        z = x.sum()
    y = x.square().sum()
    if len(x) > 5:
        print(z)
    print(y)


def returns_between(x: torch.Tensor) -> Any:
    if len(x) > 5:
        return None
    print(x.sum())
    return 1


def draws_in_a_loop(x: torch.Tensor) -> None:
    for _ in range(2):
        x = x.mul(random.random())
    print(x.sum())


def draws_after_an_op(x: torch.Tensor) -> None:
    x = x.square()
    x = x.mul(random.random())
    print(x.sum())


def helper() -> float:
    return random.random()


def draws_by_a_function(x: torch.Tensor) -> None:
    x = x.mul(helper())
    print(x.sum())


def draws_in_one_branch(x: torch.Tensor) -> None:
    y = x.mul(2.0 if len(x) > 2 else random.random())
    print(y.sum())


def draws_for_each_element(x: torch.Tensor) -> None:
    y = x.mul(torch.tensor([random.random() for _ in range(3)]))
    print(y.sum())


def draws_if_asked(x: torch.Tensor) -> None:
    y = x.mul(len(x) > 5 and random.random())
    print(y.sum())


def shuffles(x: torch.Tensor) -> None:
    order = [0, 1, 2]
    random.shuffle(order)
    print(order, x[order].sum())


def looks_at_its_variables(x: torch.Tensor) -> None:
    x = x.square()
    print(sorted(locals()))


def fetches_after_a_call(x: torch.Tensor, marks: list[int], source: Any) -> None:
    marks.append(len(marks))
    y = next(source).mul(x)
    print(y.sum())


class Private:
    __rate = 2.0

    def step(self, x: torch.Tensor) -> None:
        y = x.mul(self.__rate)
        print(y.sum())


@pytest.mark.parametrize(
    "step",
    [
        bound_by_an_assignment_within,
        bound_perhaps,
        returns_between,
        draws_in_a_loop,
        draws_in_one_branch,
        draws_for_each_element,
        draws_if_asked,
        draws_after_an_op,
        draws_by_a_function,
        looks_at_its_variables,
        Private().step,
    ],
)
def test_what_cannot_be_told_is_left_whole(step: Callable[..., Any]) -> None:
    x = torch.ones(3)
    for parts in ways(step, x):
        state = random.getstate()
        in_parts(parts, x)
        after = random.getstate()
        random.setstate(state)
        step(x)
        assert random.getstate() == after
        assert parts.before is None or "draw" not in step.__name__


def test_code_without_a_source_is_left_whole() -> None:
    space: dict[str, Any] = {}
    exec("def step(x):\n    y = x.square()\n    print(y)\n", space)
    assert ways(space["step"], torch.ones(2)) == []


def test_a_fetch_that_raises_comes_after_what_stands_before_it() -> None:
    x = torch.ones(2)
    marks: list[int] = []
    for parts in ways(fetches_after_a_call, x, marks, iter([x])):
        marks.clear()
        with pytest.raises(StopIteration):
            in_parts(parts, x, marks, iter([]))
        assert marks == [0]


def test_a_lambda_that_calls_a_method_is_that_method(capsys: pytest.CaptureFixture[str]) -> None:
    class Trainer:
        def step(self, x: torch.Tensor) -> float:
            y = x.square().sum()
            print("done")
            return y.item()

    own = Trainer()
    (parts, *_) = ways(lambda x: own.step(x), torch.ones(2))
    capsys.readouterr()
    assert in_parts(parts, torch.ones(2)) == 2.0
    assert capsys.readouterr().out == "done\n"
