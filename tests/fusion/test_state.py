"""States and modes: what users do with an array around training."""

from __future__ import annotations

import io

import pytest
import torch
from tests.fusion.oracle import assert_close, assert_each, made
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError
from hocket.fusion.store import Store

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


class Dated(nn.Linear):
    def __init__(self, epoch: int) -> None:
        super().__init__(4, 4)
        self.epoch = epoch

    def get_extra_state(self):
        return {"epoch": self.epoch}

    def set_extra_state(self, state):
        self.epoch = state["epoch"]


def test_what_layers_add_to_their_states_is_saved_and_loaded():
    models = [nn.Sequential(Dated(epoch)) for epoch in (3, 5)]
    array, other = hocket.fuse(models), hocket.fuse([nn.Sequential(Dated(0)) for _ in range(2)])
    assert list(array.state_dict()) == list(nn.ModuleList(models).state_dict())
    other.load_state_dict(array.state_dict())
    assert [each[0].epoch for each in other.unfuse()] == [3, 5]
    other.load_state_dict(array.state_dict(model=0), model=1)
    assert [each[0].epoch for each in other.unfuse()] == [3, 3]


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
    for _ in range(2):
        array.zero_grad()
        array(x).sum().backward()
    for index, model in enumerate(models):
        model(x).sum().backward()
        assert_close(array._store.tensor("fc.weight").tensor.grad[index], model.fc.weight.grad, "gradient")


class Named(dict):
    """A mapping of the user's."""


def test_a_mapping_names_the_arguments_of_losses():
    array = hocket.fuse(made(lambda: Scaled(1.0), 2), backend="rule")
    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 4, dtype=D)
    assert torch.equal(array.losses(F.mse_loss, Named(x=x), y), array.losses(F.mse_loss, x, y))


def test_one_model_takes_the_state_of_a_plain_module():
    array = hocket.fuse(made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3), shared=True)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    array.load_state_dict(other.state_dict(), model=1)
    for name, tensor in array.state_dict().items():
        model, own = name.split(".", 1)
        assert torch.equal(tensor, other.state_dict()[own] if model == "1" else before[name]), name
    with pytest.raises(hocket.errors.InputError, match="slot from 0 to 2"):
        array.load_state_dict(other.state_dict(), model=3)
    with pytest.raises(RuntimeError, match=r"missing: 0.bias.*unexpected: 0.other"):
        array.load_state_dict({**{k: v for k, v in other.state_dict().items() if k != "0.bias"}, "0.other": 1}, model=0)


def test_a_memory_format_is_refused():
    array = hocket.fuse(made(lambda: nn.Conv2d(3, 4, 3), 2), shared=True)
    with pytest.raises(hocket.errors.InputError, match="memory_format"):
        array.to(memory_format=torch.channels_last)
    assert array.to(torch.float32).get_parameter("fused.weight").dtype == torch.float32


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, scale: float):
        return self.fc(torch.tanh(x) * scale).mean(1)


class Branching(Times):
    """Looks at the value."""

    def forward(self, x, scale: float):
        return super().forward(x, scale if scale > 0.5 else -scale)


class Classes(Times):
    """Looks at the class."""

    def forward(self, x, scale: float):
        return super().forward(x if type(scale) is float else -x, {0.75: 3.0}.get(scale, scale))


@pytest.mark.parametrize("make", [Times, Branching, Classes])
@pytest.mark.parametrize("backend", ["auto", "rule"])
def test_a_trace_holds_for_the_floats_that_it_was_made_with(make, backend):
    models = made(make, 2)
    array = hocket.fuse(models, shared=True, backend=backend)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    for scale in (0.25, 0.75, 0.3, 1.0, 0.25):
        outs = [model(x, scale) for model in models]
        assert_each(array(x, scale), outs)
        losses = array.losses(lambda out: out.square().sum(), (x, scale))
        assert_each(losses, [out.square().sum() for out in outs], "loss")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a number among its arguments changes")
def test_memory_does_not_grow_over_steps_of_ever_other_shapes_and_numbers(own_objects):
    import gc
    import resource

    array = hocket.fuse(made(Times, 3), shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=[0.1, 0.2, 0.3])

    def alive() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    counts = []
    for number in range(3000):
        x = torch.randn(4, 1 + number % 700, 3, dtype=torch.float64)
        optimizer.zero_grad()
        array.losses(lambda out: out.square().sum(), (x, number / 7)).sum().backward()
        optimizer.step()
        array(x[:1], number / 9)
        if number in (999, 2999):
            counts.append(alive())
    (first, first_kib), (last, last_kib) = counts
    assert last <= first + 200, "objects"
    assert last_kib - first_kib < 16 * 1024


def test_a_refill_copies_as_few_models_of_many_as_of_two(monkeypatch):
    copied = []
    plain = Store.plain

    def counted(store, index):
        copied.append(index)
        return plain(store, index)

    monkeypatch.setattr(Store, "plain", counted)
    counts = []
    for models in (2, 9):
        array = hocket.fuse(made(lambda: nn.Linear(3, 2), models))
        copied.clear()
        array.refill(models - 1, nn.Linear(3, 2).double())
        counts.append(len(copied))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1.rate", "1.rate: Dropout has no attribute 'rate'"),
        ("2.p", "2.p: no layer is called '2'"),
        ("0.weight", "0.weight: expected an attribute, got a parameter"),
    ],
)
def test_an_attribute_that_is_not_there_is_not_set(name, message):
    array = hocket.fuse(made(lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), 2))
    with pytest.raises(InputError, match=message):
        array.set_attribute(name, 0.1)


def test_a_function_is_applied_to_each_layer_of_each_model():
    def initialise(layer):
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            layer.bias.data.zero_()
        elif isinstance(layer, nn.Dropout):
            layer.p = 0.0

    models = made(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)), 3)
    array = hocket.fuse(models)
    x = torch.randn(5, 4, dtype=D)
    array(x)
    for whole in (array, nn.Sequential(array)):
        torch.manual_seed(1)
        whole.apply(initialise)
        torch.manual_seed(1)
        for model in models:
            model.apply(initialise)
        for _ in range(2):
            assert_each(array(x), [model(x) for model in models])
    with pytest.raises(InputError, match="layer 0: has a hook"):
        array.apply(lambda layer: layer.register_forward_hook(print) if isinstance(layer, nn.Linear) else None)


def test_a_first_call_with_other_tensors_in_the_place_of_parameters():
    models = made(lambda: nn.Linear(4, 2), 2)
    array, x = hocket.fuse(models), torch.randn(5, 4, dtype=D)
    others = {name: 2 * parameter for name, parameter in array.named_parameters()}
    out = torch.func.functional_call(array, others, (x,))
    assert_each(out, [2 * model(x) for model in models])
    out.sum().backward()
    assert_close(array.fused.bias.grad, torch.full((2, 2), 10.0, dtype=D), "the gradient")
    assert_each(array(x), [model(x) for model in models])


def test_a_report_after_a_first_call_says_what_comes():
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    array(torch.ones(5, 3))
    assert array.report() == "2 models, recorded; the next such call runs by the graph"
    array(torch.ones(5, 3))
    array(torch.ones(2, 5, 3))
    assert array.report().startswith("2 models, 1 ops: 1 by rule; chosen"), "of the call before, which ran by it"


class Growing(nn.Module):
    """Positions in a buffer that is made anew for longer inputs, and a buffer of another shape and type."""

    def __init__(self, length):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(length))
        self.register_buffer("last", torch.zeros(2, dtype=torch.float32))

    def forward(self, x):
        if x.shape[1] > len(self.positions):
            self.positions = torch.arange(x.shape[1])
        out = self.fc(x) + self.positions[: x.shape[1], None] + self.positions.sum() + self.last
        self.last = out.detach().mean()
        return out


@pytest.mark.filterwarnings("ignore:hocket.fuse. Growing. the forward gives")
@pytest.mark.parametrize("backend", ["auto", "rule"])
def test_buffers_that_forwards_give_another_shape_are_followed(backend):
    models = made(lambda: Growing(3), 2)
    array = hocket.fuse(models, shared=True, backend=backend)
    for length in (2, 2, 5, 5, 2, 7, 7, 7):
        x = torch.randn(3, length, 2, dtype=D)
        assert_each(array(x), [model(x) for model in models])
    for model, fused in zip(models, array.unfuse(), strict=True):
        for name, value in model.state_dict().items():
            assert_close(fused.state_dict()[name], value, name)
    assert "ops" in array.report().splitlines()[0]


def test_a_buffer_that_a_first_call_makes_is_named_with_the_cure():
    class Lazy(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.ones(2, dtype=D))
            return super().forward(x) + self.table

    models, x = made(lambda: Lazy(3, 2), 2), torch.randn(4, 3, dtype=D)
    array = hocket.fuse(models)
    array(x)
    with pytest.warns(UserWarning, match="table is made by the forward; call each model once before they are fused"):
        array(x)
    assert_each(array(x), [model(x) for model in models])
    array = hocket.fuse(models, strict=True)
    for _ in range(2):
        assert_each(array(x), [model(x) for model in models])
