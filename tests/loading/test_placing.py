import pytest
import torch

from hocket.errors import InputError
from hocket.loading import finish, load
from hocket.loading.targets import checked_device
from loading.files import Memory, stored
from support.refusals import refused


def on_meta(make):
    with torch.device("meta"):
        return make()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.again = self.first
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.second.weight.note = "kept"
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.second(self.again(x)) * self.frozen.sum()


def test_a_model_on_the_meta_device_gets_memory_and_stays_tied():
    trained, model = Tied(), on_meta(Tied)
    load(
        model,
        Memory(stored({name: t for name, t in trained.state_dict().items() if name.startswith(("f", "second.b"))})),
    )
    assert torch.equal(model(torch.ones(3)), trained(torch.ones(3)))
    assert model.second.weight is model.first.weight
    assert model.second.weight.note == "kept"
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in trained.parameters()]


def test_an_lstm_on_the_meta_device_computes_with_the_new_weights():
    trained, model = torch.nn.LSTM(3, 2, 2), on_meta(lambda: torch.nn.LSTM(3, 2, 2))
    load(model, Memory(stored(trained.state_dict())))
    assert torch.equal(model(torch.ones(4, 3))[0], trained(torch.ones(4, 3))[0])


def test_what_has_no_values_anywhere_is_named_and_nothing_is_changed():
    model = on_meta(lambda: torch.nn.Linear(3, 2))
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(InputError, match="on the meta device, and in no file: angles;"):
        load(model, Memory(stored({"weight": torch.ones(2, 3), "bias": torch.ones(2)})))
    assert model.weight.is_meta
    del model.angles
    refused("in no file: bias", load, model, Memory(stored({"weight": torch.ones(2, 3)})), strict=False)
    assert model.weight.is_meta


def test_only_the_count_of_a_batch_norm_begins_at_zero():
    model = on_meta(lambda: torch.nn.Linear(3, 2))
    model.register_buffer("num_batches_tracked", torch.empty((), device="meta"), persistent=False)
    with pytest.raises(InputError, match="in no file: num_batches_tracked"):
        load(model, Memory(stored({"weight": torch.ones(2, 3), "bias": torch.ones(2)})))


def test_only_part_of_a_model_may_be_on_the_meta_device():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), on_meta(lambda: torch.nn.BatchNorm1d(2)))
    first = model[0].weight
    trained = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    load(model, Memory(stored(trained.state_dict())), device="cpu")
    assert torch.equal(model(torch.ones(2, 3)), trained(torch.ones(2, 3)))
    finish(model)
    assert model[0].weight is first


def test_a_device_is_called_by_its_full_name():
    assert checked_device(None) is None
    assert checked_device("cpu") == torch.device("cpu")
    refused("device: 'cuda:99'", checked_device, "cuda:99")
