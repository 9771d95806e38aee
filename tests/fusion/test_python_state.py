"""What is looked at in each call, besides tensors: globals of the user's code, and numbers of libraries' code."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import hocket
from hocket.fusion import python_state
from hocket.fusion.python_state import Globals

CODE = """
from torch import nn

SCALE = 2.0
TABLE = {"scale": 1.0}


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE * TABLE["scale"]


def scaling():
    by = 2.0

    def scale(x):
        return x * by

    def set_by(value):
        nonlocal by
        by = value

    return scale, set_by


class ScaledBy(nn.Linear):
    def forward(self, x):
        return self.scale(super().forward(x))
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "scaled.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("scaled", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_number_that_a_librarys_code_names_is_looked_at_as_one_of_the_users_is(
    is_installed, module, tmp_path, monkeypatch
):
    if is_installed:
        monkeypatch.setattr(python_state, "_INSTALLED", (str(tmp_path),))
    models = [module.Scaled(3, 2).double() for _ in range(2)]
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3).double()
    for module.SCALE in (2.0, 5.0, 5.0, 0.5):
        found = array(x)
        for index, model in enumerate(models):
            torch.testing.assert_close(found[index], model(x))


@pytest.mark.parametrize("is_installed", [False, True])
def test_so_is_one_in_a_closure(is_installed, module, tmp_path, monkeypatch):
    if is_installed:
        monkeypatch.setattr(python_state, "_INSTALLED", (str(tmp_path),))
    models = [module.ScaledBy(3, 2).double() for _ in range(2)]
    scale, set_by = module.scaling()
    for model in models:
        model.scale = scale
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3).double()
    for by in (2.0, 5.0):
        set_by(by)
        found = array(x)
        for index, model in enumerate(models):
            torch.testing.assert_close(found[index], model(x))


def test_a_module_of_the_users_may_be_called_like_one_of_pythons(tmp_path, monkeypatch):
    path = tmp_path / "profile.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("profile", path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "profile", found)
    spec.loader.exec_module(found)
    models = [found.Scaled(3, 2).double() for _ in range(2)]
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3).double()
    for found.SCALE in (2.0, 5.0):
        torch.testing.assert_close(array(x)[1], models[1](x))


def test_containers_are_looked_into_where_the_code_is_the_users(module):
    models = [module.Scaled(3, 2).double() for _ in range(2)]
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3).double()
    for module.TABLE["scale"] in (1.0, 3.0):
        found = array(x)
        for index, model in enumerate(models):
            torch.testing.assert_close(found[index], model(x))


def test_a_call_of_a_model_from_a_library_looks_at_few_values():
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    known = Globals([transformers.BertModel(transformers.BertConfig(vocab_size=11, **options))])
    assert len(known._now()) + len(known._numbers) < 1000, "it was 26,000 with the registries of all models"
    assert len({(id(holder), key) for holder, key, _ in known._numbers}) == len(known._numbers), "each one once"


class InDefaultType(torch.nn.Module):
    """Asks for torch's default type in each call."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).to(torch.get_default_dtype())


def test_another_default_type_is_another_kind_of_call():
    models = [InDefaultType() for _ in range(2)]
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3)
    usual = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found, plain = array(x), models[1](x)
            assert found.dtype == plain.dtype == dtype
            torch.testing.assert_close(found[1], plain)
    finally:
        torch.set_default_dtype(usual)


class OtherUnderAutocast(InDefaultType):
    """Asks whether autocast is on."""

    def forward(self, x):
        out = self.linear(x).float()
        return 2 * out if torch.is_autocast_enabled("cpu") else out


def test_a_forward_that_asks_for_autocast_has_another_graph_under_it():
    models = [OtherUnderAutocast() for _ in range(2)]
    array = hocket.fuse(models, shared=True)
    x = torch.randn(4, 3)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            torch.testing.assert_close(array(x)[1], models[1](x))
