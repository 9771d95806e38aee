"""Two names for one memory: what stacking would part is refused, what it keeps is not."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.fusion.oracle import check_step, made
from torch import nn

import hocket
from hocket.errors import InputError
from support.refusals import refused


class Two(nn.Module):
    """Two layers, and what a function of them adds."""

    def __init__(self, add=lambda model: None):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        add(self)

    def forward(self, x):
        return self.b(self.a(x))


def tied_by_data(model):
    model.b.weight.data = model.a.weight.data


def tied_in_part(model):
    model.b.bias.data = model.a.weight.data[1]


def buffer_of_a_parameter(model):
    model.register_buffer("first", model.a.weight.data)


def attribute_of_a_parameter(model):
    model.kept = {"first": [model.a.weight.detach()]}


def array_of_a_parameter(model):
    model.table = model.a.bias.detach().numpy()[::-1]


def in_a_closure(model):
    first = model.a.weight.detach()
    model.function = lambda x: x @ first


PARTED = {
    tied_by_data: ("a.weight", "b.weight"),
    tied_in_part: ("a.weight", "b.bias"),
    buffer_of_a_parameter: ("a.weight", "first"),
    attribute_of_a_parameter: ("a.weight", "kept"),
    array_of_a_parameter: ("a.bias", "table"),
    in_a_closure: ("a.weight", "function"),
}


@pytest.mark.parametrize("add", PARTED)
def test_a_parameter_that_shares_its_memory_is_refused_by_name(add):
    with pytest.raises(InputError, match="shares memory with") as found:
        hocket.fuse([Two(), Two(add)], shared=True)
    assert all(f"model 1: {name}" in str(found.value) for name in PARTED[add])


def test_models_that_share_memory_are_refused():
    models = [Two(), Two()]
    models[1].b.bias.data = models[0].a.bias.data
    refused(r"(model 1: b\.bias|model 0: a\.bias) shares memory with model", hocket.fuse, models, shared=True)


def tied(model):
    model.b.weight = model.a.weight


def own_again(model):
    model.again = [model.a, model.a.weight]


def constants_of_one_memory(model):
    model.table = torch.ones(6)
    model.rows = model.table.view(2, 3)


def parts_of_a_buffer(model):
    whole = torch.zeros(6)
    model.a.bias.data, model.b.bias.data = whole[:3], whole[3:]


@pytest.mark.parametrize("add", [tied, own_again, constants_of_one_memory, parts_of_a_buffer])
def test_what_stacking_keeps_is_fused(add):
    array = hocket.fuse([Two(add), Two(add)], shared=True)
    x = torch.randn(4, 3)
    torch.testing.assert_close(array(x)[1], array.unfuse()[1](x))


def test_a_model_that_comes_into_a_slot_is_looked_at_too():
    array = hocket.fuse([Two(), Two()], shared=True)
    before = [parameter.clone() for parameter in array.parameters()]
    refused(r"b\.weight shares memory|a\.weight shares memory", array.refill, 0, Two(tied_by_data))
    assert all(map(torch.equal, array.parameters(), before))


@pytest.mark.parametrize("backend", ["auto", "rule", "loop", "vmap"])
def test_parameters_of_an_array_whose_data_is_bound_anew_between_calls_count(backend):
    models = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 3)
    array, alone = hocket.fuse(models, backend=backend), copy.deepcopy(models)
    x = torch.randn(5, 4).double()
    for call in range(8):
        if call in (3, 5):
            for parameter in [*array.parameters(), *(p for model in alone for p in model.parameters())]:
                parameter.data = parameter.data * 1.5
        for each in (array, *alone):
            each.zero_grad()
        check_step(array, alone, lambda model: model(x))
