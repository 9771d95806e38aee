"""Two callables are compared on copies, by all that they leave behind."""

from typing import Any

import torch

from hocket.dynamo.outcome import difference


def test_a_batch_is_copied_without_the_data_that_it_is_cut_from() -> None:
    data = torch.arange(400_000.0)
    batch, other = data[50_002:50_012].view(5, 2), data[50_009:50_020:2]
    seen: list[int] = []

    def run(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        seen.extend(each.untyped_storage().nbytes() for each in (first, second))
        found = [first.clone(), second.clone()]
        first.mul_(2)
        return [*found, second.clone()]

    def plain(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        return [batch, other, torch.where(other < 50_012, other * 2, other)]

    before = data.clone()
    assert difference(run, run, [batch, other], []) == ""
    assert max(seen) < 1_000
    assert difference(run, plain, [batch, other], []) == "an argument (0)"
    assert torch.equal(data, before)


def test_gradients_under_autocast_are_those_of_a_backward_outside_of_it() -> None:
    class Rounded(torch.autograd.Function):
        """Its backward rounds where autocast is off alone."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (2 if torch.is_autocast_enabled("cpu") else 2.5)

    value = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(lambda x: x * 2, lambda x: x * 2, [value], []) == ""
        assert difference(lambda x: x * 2, Rounded.apply, [value], []) == "a gradient (0)"


def test_floats_may_differ_by_a_share_of_the_largest() -> None:
    weight = torch.tensor([1.0, 1e-7], requires_grad=True)

    def scaled(x: torch.Tensor, factors: tuple[float, float]) -> torch.Tensor:
        return x * torch.tensor(factors)

    def found(factors: tuple[float, float], tolerance: float) -> str:
        return difference(lambda x: scaled(x, (1, 1)), lambda x: scaled(x, factors), [weight], [], tolerance)

    assert found((1.01, 1), 0.02) == ""
    assert found((1.01, 1), 0.0) == found((1.03, 1), 0.02) == "an output (0)"
    assert found((1, 5), 0.02) == "a gradient (0)"
