"""Models whose uses are not known are loaded before the call returns, and say why."""

import logging
from functools import partial

import pytest
import torch

from hocket.errors import ExecutionError, FormatError, InputError
from hocket.loading import load
from hocket.loading.held import is_held
from loading.files import Failing, Memory, OneWay, stored
from support.refusals import fails, refused


class OwnLoad(torch.nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Special(torch.Tensor):
    pass


def hooked():
    model = torch.nn.Linear(3, 2)
    model.register_load_state_dict_post_hook(lambda module, keys: None)
    return model


def overridden(name, function):
    model = torch.nn.Linear(3, 2)
    setattr(model, name, partial(function, model))
    return model


def load_doubled(model, state, prefix, *args):
    doubled = {name: tensor * 2 for name, tensor in state.items()}
    return torch.nn.Module._load_from_state_dict(model, doubled, prefix, *args)


def load_renamed(model, state, strict=True):
    renamed = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return torch.nn.Module.load_state_dict(model, renamed, strict)


def special():
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(model.weight.detach().as_subclass(Special))
    return model


def viewed(kept):
    model = torch.nn.Linear(3, 2)
    kept.append(model.weight.detach()[0])
    return model


def overlapping():
    model = torch.nn.Linear(3, 2)
    model.bias.data = model.weight.data.view(-1)[:2]
    return model


KEPT: list[torch.Tensor] = []
CASES = {
    "script": (lambda: torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(3)), "is a script"),
    "compiled": (lambda: compiled(), "is compiled"),
    "hooks": (hooked, "has hooks on loading a state"),
    "lazy": (lambda: torch.nn.LazyLinear(2), "has hooks on loading a state"),
    "special": (special, "weight is a"),
    "viewed": (lambda: viewed(KEPT), "the memory of weight is also that of a tensor that is not the model's"),
    "overlapping": (overlapping, "bias and weight overlap in memory"),
}


def compiled():
    model = torch.nn.Linear(3, 2)
    model.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_it_is_loaded_at_once_and_the_log_says_why(case, caplog):
    make, words = CASES[case]
    model = make()
    data = stored({"weight": torch.full((2, 3), 0.5), "bias": torch.zeros(2)})
    with caplog.at_level(logging.INFO, logger="hocket"):
        load(model, Memory(data))
    assert words in caplog.text
    assert not any(is_held(parameter) for parameter in model.parameters())
    expected = torch.nn.Linear(3, 2)
    expected.load_state_dict({"weight": torch.full((2, 3), 0.5), "bias": torch.zeros(2)})
    if case != "overlapping":
        assert torch.equal(model(torch.ones(3)), expected(torch.ones(3)))
    if case == "viewed":
        assert KEPT[-1].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("reader", [Memory, OneWay])
def test_a_module_that_loads_itself_is_asked(reader):
    model = torch.nn.Sequential(OwnLoad(3, 2))
    load(model, reader(stored({"0.kernel": torch.arange(6.0).reshape(3, 2), "0.bias": torch.zeros(2)})))
    assert model[0].weight.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_an_instance_that_loads_itself_is_asked():
    values = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    model = load(overridden("_load_from_state_dict", load_doubled), Memory(stored(values)))
    assert model.weight.sum() == 12
    wrapped = {f"module.{name}": tensor for name, tensor in values.items()}
    assert load(overridden("load_state_dict", load_renamed), Memory(stored(wrapped))).weight.sum() == 6


def test_a_load_that_is_refused_leaves_a_model_without_memory_as_it_was():
    with torch.device("meta"):
        model = torch.nn.Sequential(hooked(), torch.nn.Linear(3, 2))
    values = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    refused(r"size mismatch for 1\.weight", load, model, Memory(stored({**values, "1.weight": torch.ones(3)})))
    truncated = Memory(stored(values)[:-4])
    truncated.size = None
    fails(FormatError, "truncated", load, model, truncated)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    values.pop("1.weight")
    refused(r"in no file: 1\.weight", load, model, Memory(stored(values)), strict=False)


def test_what_failed_to_arrive_and_is_in_no_other_file_stays_an_error():
    values = torch.nn.Linear(3, 2).state_dict()
    model = torch.nn.Linear(3, 2)
    load(model, Failing(stored(values), 0))
    model.register_load_state_dict_post_hook(lambda module, keys: None)
    load(model, Memory(stored({"weight": values["weight"]})), strict=False)
    assert torch.equal(model.weight, values["weight"])
    fails(ExecutionError, "'bias' has not arrived", model, torch.ones(3))


def test_a_file_of_another_model_is_told_in_torchs_words():
    with pytest.raises(InputError, match=r"memory: Error\(s\) in loading state_dict for Linear"):
        load(hooked(), Memory(stored({"weight": torch.ones(2, 3)})))


def test_tied_weights_need_be_there_once():
    model = torch.nn.Sequential(hooked(), torch.nn.Linear(3, 2))
    model[1].weight = model[0].weight
    load(model, Memory(stored({"1.weight": torch.ones(2, 3), "0.bias": torch.ones(2), "1.bias": torch.ones(2)})))
    assert model[0].weight.sum() == 6


def test_a_graph_that_is_alive_is_no_reason(caplog):
    model = torch.nn.Linear(3, 2)
    kept = model(torch.ones(3))
    torch.optim.Adam(model.parameters())
    with caplog.at_level(logging.INFO, logger="hocket"):
        load(model, Memory(stored({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})))
        assert model(torch.ones(3)).tolist() == [3, 3]
    assert caplog.text == ""
    assert kept.requires_grad
