"""However a tensor is used, the use is noticed before it happens; asking for its shape is none."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

from hocket.loading.held import hold, is_held, use

IN = torch.ones(1, 3)


class Arriving:
    """A weight that is 0 until its first use, and 2 from then on."""

    def __init__(self, tensor):
        self.tensor, self.uses = tensor, 0
        self.memory = tensor.detach()
        hold(tensor, self.arrive)

    def arrive(self):
        self.uses += 1
        self.memory.fill_(2)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad, torch.ones_like(weight)


def pickled(weight):
    return pickle.loads(pickle.dumps(weight)).sum()


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file).sum()


USES = {
    "function": lambda weight: F.linear(IN, weight),
    "method": lambda weight: weight.sum(),
    "operator": lambda weight: 1 + weight,
    "matmul": lambda weight: IN @ weight.t(),
    "in a list": lambda weight: torch.cat([torch.zeros(2, 3), weight]),
    "in a nested list": lambda weight: torch.stack(tensors=[weight, weight]),
    "foreach": lambda weight: torch._foreach_add([weight.detach()], 1)[0],
    "aten": lambda weight: torch.ops.aten.mm(IN, weight.t()),
    "data": lambda weight: weight.data.sum(),
    "item": lambda weight: weight.tolist()[0][0],
    "numpy": lambda weight: weight.detach().numpy().sum(),
    "index": lambda weight: weight[0],
    "iteration": lambda weight: next(iter(weight)),
    "clone": lambda weight: weight.clone(),
    "copied": lambda weight: copy.deepcopy(weight).sum(),
    "shallow": lambda weight: copy.copy(weight).sum(),
    "pickled": pickled,
    "saved": saved,
    "printed": lambda weight: torch.tensor("2." in repr(weight)),
    "out": lambda weight: torch.add(IN, weight, out=torch.empty(2, 3)) if not weight.requires_grad else weight + 1,
    "memory": lambda weight: torch.tensor(weight.data_ptr() and weight.untyped_storage().tolist()[3]),
    "vmap": lambda weight: torch.vmap(lambda row: row * 2)(weight),
    "checkpoint": lambda weight: torch.utils.checkpoint.checkpoint(F.linear, IN, weight, use_reentrant=False),
    "state": lambda weight: torch.nn.ParameterList([weight]).state_dict()["0"].sum(),
}


# A list of parameters takes no buffer.
OF_PARAMETERS = ("state", torch.Tensor)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in USES for kind in (torch.nn.Parameter, torch.Tensor) if (name, kind) != OF_PARAMETERS],
)
def test_every_use_is_noticed(name, kind):
    expected = USES[name](kind_of(kind, torch.full((2, 3), 2.0)))
    arriving = Arriving(kind_of(kind, torch.zeros(2, 3)))
    found = USES[name](arriving.tensor)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert arriving.uses == 1
    assert type(arriving.tensor) is kind


def kind_of(kind, values):
    return torch.nn.Parameter(values) if kind is torch.nn.Parameter else values


def test_what_tells_nothing_of_values_is_no_use():
    arriving = Arriving(torch.nn.Parameter(torch.zeros(2, 3)))
    weight = arriving.tensor
    assert (weight.shape, weight.size(0), weight.dim(), len(weight), weight.numel()) == ((2, 3), 2, 2, 2, 6)
    assert (weight.dtype, weight.device.type, weight.requires_grad, weight.is_leaf) == (
        torch.float32,
        "cpu",
        True,
        True,
    )
    assert weight.grad is None
    weight.grad = torch.ones(2, 3)
    weight.grad = None
    assert weight in {weight: 1}
    torch.optim.SGD([weight], lr=0.1).zero_grad()
    weight.requires_grad_(False).requires_grad = True
    assert isinstance(weight, torch.nn.Parameter)
    assert arriving.uses == 0


UNNOTICED = {
    "dlpack": torch.utils.dlpack.to_dlpack,
    "autograd function": lambda weight: Scale.apply(IN, weight).sum().backward(),
    "raw class": lambda weight: torch.Tensor._make_subclass(torch.Tensor, weight.data_ptr and weight) + IN,
}


@pytest.mark.parametrize("name", UNNOTICED)
def test_a_use_that_goes_unnoticed_fails_and_does_not_compute_with_other_values(name):
    arriving = Arriving(torch.nn.Parameter(torch.zeros(2, 3)))
    with pytest.raises((RuntimeError, BufferError, NotImplementedError)):
        UNNOTICED[name](arriving.tensor)
    gc.collect()
    assert arriving.tensor.sum() == 12
    assert type(arriving.tensor) is torch.nn.Parameter


def test_a_graph_from_before_is_told_that_the_values_change():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    loss = (weight * weight).sum()
    arriving = Arriving(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert arriving.tensor.sum() == 12


def test_a_tensor_that_is_made_of_the_class_of_a_held_one_is_an_ordinary_one():
    arriving = Arriving(torch.nn.Parameter(torch.zeros(2, 3)))
    other = torch.Tensor._make_subclass(type(arriving.tensor), torch.ones(2))
    assert other.sum() == 2
    assert type(other) is torch.nn.Parameter
    assert arriving.uses == 0


def test_gradients_reach_the_tensor_itself():
    layer = torch.nn.Linear(3, 2)
    arriving = Arriving(layer.weight)
    layer(IN).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 3))
    assert layer.weight is arriving.tensor


def test_a_write_comes_after_the_values():
    arriving = Arriving(torch.zeros(3))
    arriving.tensor[0] = 7
    assert arriving.tensor.tolist() == [7, 2, 2]


def test_what_the_first_use_raises_is_raised_each_time():
    def fail():
        raise ConnectionError("gone")

    weight = torch.zeros(3)
    hold(weight, fail)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            weight.sum()
    assert is_held(weight)
    hold(weight, lambda: None)
    use(weight)
    assert not is_held(weight)
    assert "_hocket_hold" not in vars(weight)


def test_an_lstm_sees_the_weights_of_its_list():
    lstm, plain = torch.nn.LSTM(3, 2), torch.nn.LSTM(3, 2)
    for weight in plain.parameters():
        torch.nn.init.constant_(weight, 2)
    arriving = [Arriving(weight) for weight in lstm.parameters()]
    assert torch.equal(lstm(IN)[0], plain(IN)[0])
    assert [one.uses for one in arriving] == [1, 1, 1, 1]
