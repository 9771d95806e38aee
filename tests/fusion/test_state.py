"""States and modes: what users do with an array around training."""

from __future__ import annotations

import io

import pytest
import torch
from tests.fusion.oracle import assert_close, made
from torch import nn
from torch.nn import functional as F

import hocket

D = torch.float64


def test_the_state_of_one_model_is_saved_alone():
    array = hocket.fuse(made(lambda: nn.Linear(64, 64), 8))
    sizes = []
    for state in (array.state_dict(model=0), array.unfuse()[0].state_dict()):
        file = io.BytesIO()
        torch.save(state, file)
        sizes.append(file.getbuffer().nbytes)
    assert sizes[0] < 1.1 * sizes[1]


def separate_models():
    models = [nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 2)).double() for act in (nn.Tanh(), nn.PReLU())]
    return [nn.Sequential(model, nn.Linear(2, 2).double()) for model in models]


def test_an_array_with_separate_blocks_in_another_module_loads_its_state():
    holder = nn.Sequential(hocket.fuse(separate_models(), backend="rule"))
    other = nn.Sequential(hocket.fuse(separate_models(), backend="rule"))
    other.load_state_dict(holder.state_dict())
    x = torch.randn(5, 4, dtype=D)
    assert torch.equal(other(x), holder(x))


class Scaled(nn.Module):
    """A number and a tensor of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.fc, self.by, self.shift = nn.Linear(4, 4), by, torch.full((4,), by, dtype=D)

    def forward(self, x):
        return (self.fc(x) * self.by + self.shift) ** 2


@pytest.mark.parametrize("backend", ["auto", "rule", "vmap", "loop"])
def test_training_after_a_first_call_in_inference_mode(backend):
    by = iter((2.0, 3.0))
    models = made(lambda: Scaled(next(by)), 2)
    array = hocket.fuse(models, backend=backend)
    x = torch.randn(5, 4, dtype=D)
    with torch.inference_mode():
        array(x)
    array(x).sum().backward()
    for index, model in enumerate(models):
        model(x).sum().backward()
        assert_close(array.tensor("fc.weight").tensor.grad[index], model.fc.weight.grad, "gradient")


class Named(dict):
    """A mapping of the user's."""


def test_a_mapping_names_the_arguments_of_losses():
    array = hocket.fuse(made(lambda: Scaled(1.0), 2), backend="rule")
    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 4, dtype=D)
    assert torch.equal(array.losses(F.mse_loss, Named(x=x), y), array.losses(F.mse_loss, x, y))


def test_models_that_nobody_can_trace_print_nothing(capsys):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if self.fc(x).sum() > 0 else x

    with pytest.warns(UserWarning, match="Looks has no rule"):
        hocket.fuse([Looks(), Looks()])(torch.ones(5, 4))
    assert "def forward" not in capsys.readouterr().out


def test_a_refill_copies_as_few_models_of_many_as_of_two(monkeypatch):
    copied = []
    plain = hocket.fusion.model.Array._plain

    def counted(array, index):
        copied.append(index)
        return plain(array, index)

    monkeypatch.setattr(hocket.fusion.model.Array, "_plain", counted)
    counts = []
    for models in (2, 9):
        array = hocket.fuse(made(lambda: nn.Linear(3, 2), models))
        copied.clear()
        array.refill(models - 1, nn.Linear(3, 2).double())
        counts.append(len(copied))
    assert counts[0] == counts[1]
