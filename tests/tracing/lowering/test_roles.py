"""Role and name of each op of a step, on nets small enough to write the answer down."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.ir import ROLES
from hocket.tracing import capture
from hocket.tracing.captured import Captured


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


generator = torch.Generator().manual_seed(0)
IMAGES = torch.randn(2, 1, 8, 8, generator=generator), torch.tensor([0, 1])
ROWS = torch.randn(2, 4, generator=generator), torch.tensor([0, 1])


def captured(model, batch, optimizer=None, loss_of=F.cross_entropy, clip: bool = False) -> Captured:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        return loss

    step(batch)
    return capture(step, model, optimizer, batch)


def described(found: Captured, *roles: str) -> list[tuple[str, str, str]]:
    return [(op.name, op.role, op.layer) for op in found.graph.ops if not roles or op.role in roles]


def test_the_ops_of_a_convolutional_net():
    found = captured(ConvNet(), IMAGES)
    assert [row for row in described(found) if row[1] != "update"] == [
        ("features.0/convolution", "forward", "features.0"),
        ("features.1/add_", "forward", "features.1"),
        ("features.1/native_batch_norm", "forward", "features.1"),
        ("features.2/relu", "forward", "features.2"),
        ("features.3/convolution", "forward", "features.3"),
        ("head/addmm", "forward", "head"),
        ("_log_softmax", "forward", ""),
        ("nll_loss_forward", "forward", ""),
        ("full", "forward", ""),
        ("nll_loss_backward", "activation_grad", ""),
        ("_log_softmax_backward_data", "activation_grad", ""),
        ("head/mm", "activation_grad", "head"),
        ("head/mm.1", "weight_grad", "head"),
        ("head/sum", "bias_grad", "head"),
        ("features.3/convolution_backward.activation", "activation_grad", "features.3"),
        ("features.3/convolution_backward.weight", "weight_grad", "features.3"),
        ("features.3/convolution_backward.bias", "bias_grad", "features.3"),
        ("features.2/threshold_backward", "activation_grad", "features.2"),
        # Computes the gradients of its weight and bias along with that of its input.
        ("features.1/native_batch_norm_backward", "activation_grad", "features.1"),
        ("features.0/convolution_backward.weight", "weight_grad", "features.0"),
        ("features.0/convolution_backward.bias", "bias_grad", "features.0"),
    ]
    assert described(found, "update") == [
        (f"{layer}.{key}/update{number}", "update", layer)
        for layer in ("features.0", "features.1", "features.3", "head")
        for key in ("weight", "bias")
        for number in ("", ".1", ".2")
    ]


def test_the_ops_of_a_perceptron():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    found = captured(model, ROWS, torch.optim.SGD(model.parameters(), lr=0.1))
    assert described(found, "forward")[:3] == [
        ("0/addmm", "forward", "0"),
        ("1/relu", "forward", "1"),
        ("2/mm", "forward", "2"),
    ]
    assert described(found, "activation_grad")[2:] == [
        ("2/mm.2", "activation_grad", "2"),
        ("1/threshold_backward", "activation_grad", "1"),
    ]
    # The gradient of the images is not needed, so the first layer has none.
    assert described(found, "weight_grad") == [("2/mm.1", "weight_grad", "2"), ("0/mm", "weight_grad", "0")]
    assert described(found, "bias_grad") == [("0/sum", "bias_grad", "0")]
    assert described(found, "update") == [
        ("0.weight/update", "update", "0"),
        ("0.bias/update", "update", "0"),
        ("2.weight/update", "update", "2"),
    ]


def test_clipping_is_neither_a_gradient_nor_an_update():
    found = captured(ConvNet(), IMAGES, clip=True)
    kernels = {op.target for op in found.graph.ops if op.role == "other"}
    assert {"aten.linalg_vector_norm", "aten.mul_"} <= kernels
    assert len(described(found, "weight_grad")) == 3


def test_a_tied_weight_has_a_gradient_from_either_use_and_their_sum():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.out = nn.Linear(4, 5, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x))

    found = captured(Tied(), (torch.tensor([0, 3]), torch.tensor([1, 2])))
    layers = {op.layer for op in found.graph.ops if op.role == "weight_grad"}
    assert layers >= {"words", "out"}
    assert {op.name.rpartition("/")[0] for op in found.graph.ops if op.role == "update"} == {"words.weight"}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_summed_over_parts_of_a_batch_stay_weight_gradients(to_none):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad(set_to_none=to_none)
        for part in (slice(0, 2), slice(2, 4)):
            F.cross_entropy(model(batch[0][part]), batch[1][part]).backward()
        optimizer.step()

    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
    step(batch)
    found = capture(step, model, optimizer, batch)
    sums = ["aten.add_"] * (1 if to_none else 2)
    assert sorted(op.target for op in found.graph.ops if op.role == "weight_grad") == [*sums, "aten.mm", "aten.mm"]
    assert sorted(op.target for op in found.graph.ops if op.role == "bias_grad") == [*sums, "aten.sum", "aten.sum"]


def test_layers_of_several_models_are_told_apart():
    first, second = nn.Linear(4, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        F.cross_entropy(second(first(batch[0])), batch[1]).backward()
        optimizer.step()

    found = capture(step, [first, second], optimizer, ROWS)
    assert {op.layer for op in found.graph.ops} == {"", "model0", "model1"}
    assert "model0.weight/update" in found.graph.by_name


def test_names_are_unique_and_hold_neither_white_space_nor_commas():
    model = nn.Sequential()
    model.add_module("a b", nn.Linear(4, 4))
    model.add_module("a,b", nn.Linear(4, 4))
    model.add_module("a_b", nn.Linear(4, 3))
    found = captured(model, ROWS)
    names = [op.name for op in found.graph.ops]
    assert len(set(names)) == len(names)
    assert not any(set(name) & set(", \t\n") for name in names)


def test_every_role_is_one_that_a_graph_may_have_and_an_update_writes_a_lasting_tensor():
    found = captured(ConvNet(), IMAGES, clip=True)
    assert {op.role for op in found.graph.ops} <= set(ROLES)
    lasting = [op.name for op in found.graph.ops if op.role == "update" and op.target.endswith("_")]
    assert all(not found.graph[name].stateless for name in lasting)
    assert found.graph["features.0/convolution"].stateless
    assert not found.graph["features.1/native_batch_norm"].stateless


def test_flops_of_products_and_convolutions_are_counted_from_their_shapes():
    found = captured(ConvNet(), IMAGES).graph
    # two operations for each multiplication: images x outputs x places x inputs x kernel
    assert found["features.0/convolution"].flops == 2 * 2 * 4 * 6 * 6 * 1 * 9
    assert found["features.3/convolution"].flops == 2 * 2 * 4 * 4 * 4 * 4 * 9
    assert found["head/addmm"].flops == 2 * 2 * 64 * 3
    assert found["head/mm"].flops == found["head/mm.1"].flops == found["head/addmm"].flops
