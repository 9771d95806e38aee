"""Steps that stay eager, one for each reason: that of the line marked "here". "_cured" does what the reason says."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hocket

SHOW = hocket.sink(lambda *values: None)
RATE = torch.tensor(0.05)
LARGE = torch.zeros(2**19)  # more than is kept in each step


class Parts:
    """The parts of a step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.table: dict[Any, Any] = {
            "loss": 0.5,
            "list": [],
            "n": 0,
            "object": None,
            "deque": deque([0]),
            "kept": None,
            "array": np.zeros(2),
            "tensor": torch.zeros(2),
            "names": {},
            "stats": {"loss": 0.0},
        }
        self.numbers = iter(range(10_000))

    def train(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()


def usual(p, batch):
    return p.train(p.loss(batch))


leaves_torch_cured = reads_a_rate_cured = uses_a_layout_cured = runs_no_ops_cured = usual


def reads_a_value(p, batch):
    out = p.model(batch)
    out = out * (1 + int(out.sum() > 1e9))  # here
    return p.train(out.square().mean())


def reads_a_value_cured(p, batch):
    out = p.model(batch)
    out = torch.where(out.sum() > 1e9, out * 2, out)
    return p.train(out.square().mean())


def looks_for_nan(p, batch, check_nan=True):
    p.optimizer.zero_grad()
    loss = p.loss(batch)
    with torch.autograd.set_detect_anomaly(True, check_nan):
        loss.backward()  # here
    p.optimizer.step()
    return loss.detach()


def looks_for_nan_cured(p, batch):
    return looks_for_nan(p, batch, False)


def reads_many_values(p, batch):
    many = p.model(batch).detach().repeat(200, 1).tolist()  # here
    return p.train(p.loss(batch) * len(many) / 1000)


def reads_many_values_cured(p, batch):
    many = p.model(batch).detach().repeat(200, 1)
    return p.train(p.loss(batch) * len(many) / 1000)


def uses_a_late_number(p, batch):
    loss = p.loss(batch)
    scale = math.exp(loss.item())  # here
    return p.train(loss * (1 + scale))


def uses_a_late_number_cured(p, batch):
    loss = p.loss(batch)
    return p.train(loss * (1 + loss.detach().exp()))


def makes_a_shape_of_values(p, batch):
    out = p.model(batch)
    return p.train(out[out > -1e9].square().mean())  # here


def makes_a_shape_of_values_cured(p, batch):
    out = p.model(batch)
    return p.train(torch.where(out > -1e9, out, 0.0).square().mean())


def leaves_torch(p, batch):
    loss = p.loss(batch)
    p.train(loss)
    return float(np.array([loss.detach()]).sum())  # here


def replaces_memory(p, batch):
    out, weight = p.train(p.loss(batch)), p.model[0].weight
    weight.data = weight.data.t().contiguous().t() if weight.is_contiguous() else weight.data.contiguous()  # here
    return out


def replaces_memory_cured(p, batch):
    out, weight = p.train(p.loss(batch)), p.model[0].weight
    weight.data.copy_(weight.data.t().contiguous().t())
    return out


def computes_with_an_array(p, batch):
    return p.train(p.loss(torch.from_numpy(batch)) * (2 + int(batch.max())))  # here


def computes_with_an_array_cured(p, batch):
    return p.train(p.loss(torch.from_numpy(batch)) * (2 + torch.from_numpy(batch).max().trunc()))


def catches_an_error(p, batch):
    LARGE.add_(1)
    out = p.model(batch)
    try:
        loss = nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.int64))  # here
    except IndexError:
        loss = out.square().mean()
    return p.train(loss)


def catches_an_error_cured(p, batch):
    LARGE.add_(1)
    return p.train(nn.functional.cross_entropy(p.model(batch), torch.zeros(4, dtype=torch.int64)))


def goes_on_after_an_error(p, batch):
    out = p.model(batch)
    try:
        loss = nn.functional.cross_entropy(out, torch.full((4,), 9))  # here
    except IndexError:
        loss = out.square().mean()
    return p.train(loss)


def goes_on_after_an_error_cured(p, batch):
    labels, out = torch.full((4,), 9), p.model(batch)
    return p.train(nn.functional.cross_entropy(out, labels) if labels.max() < 3 else out.square().mean())


def keeps_a_number_early(p, batch):
    LARGE.add_(1)
    p.table["loss"] = p.loss(batch).item()  # here
    return p.train(nn.functional.cross_entropy(p.model(batch), torch.zeros(4, dtype=torch.int64)))


def keeps_a_number_early_cured(p, batch):
    LARGE.add_(1)
    first = p.loss(batch)
    loss = p.train(nn.functional.cross_entropy(p.model(batch), torch.zeros(4, dtype=torch.int64)))
    p.table["loss"] = first.item()
    return loss


def computes_unseen(p, batch):
    out, kinds = p.model(batch), torch.zeros(4, dtype=torch.int64)
    rate = p.optimizer.param_groups[0]["lr"]
    loss = torch._C._nn.cross_entropy_loss(out, kinds, None, 1, -100, label_smoothing=rate)  # here
    return p.train(loss)


def computes_unseen_cured(p, batch):
    out, kinds = p.model(batch), torch.zeros(4, dtype=torch.int64)
    return p.train(nn.functional.cross_entropy(out, kinds, label_smoothing=p.optimizer.param_groups[0]["lr"]))


def reads_a_rate(p, batch):
    for group in p.optimizer.param_groups:
        group.update(lr=RATE)
    p.optimizer.zero_grad()
    loss = p.loss(batch)
    loss.backward()
    RATE.copy_(loss.detach() / 100)
    p.optimizer.step()  # here


def computes_otherwise(p, batch):
    return p.train(p.model(batch).sigmoid().prod(1).mean())  # here


def computes_otherwise_cured(p, batch):
    return p.train(p.model(batch).sigmoid().cumprod(1)[:, -1].mean())


def sets_random_state(p, batch):
    torch.manual_seed(3)
    return p.train(p.loss(batch + torch.rand(4, 6)))  # here


def sets_random_state_cured(p, batch):
    return p.train(p.loss(batch + torch.rand(4, 6)))


def draws_from_a_generator(p, batch):
    own = torch.Generator().manual_seed(3)
    return p.train(p.loss(batch + torch.rand(4, 6, generator=own)))  # here


draws_from_a_generator_cured = sets_random_state_cured


def moves_memory(p, batch):
    scratch = torch.zeros(4)
    scratch.resize_(3)  # here; a larger size would read memory that has no value
    return p.train(p.loss(batch) + scratch.sum() * 0)


def moves_memory_cured(p, batch):
    scratch = torch.zeros(3)
    return p.train(p.loss(batch) + scratch.sum() * 0)


def uses_a_layout(p, batch):
    sparse = batch.to_sparse()  # here
    return p.train(p.loss(sparse.to_dense()))


MAKE = torch.Tensor._make_subclass


def shares_memory_unseen(p, batch):
    turned = MAKE(torch.Tensor, torch.complex(batch, batch))
    return p.train(p.model(turned.real).square().mean())  # here


def shares_memory_unseen_cured(p, batch):
    return p.train(p.loss(torch.complex(batch, batch).detach().real))


def makes_state(p, batch):  # here
    loss = p.train(p.loss(batch))
    p.optimizer.state[p.model[0].weight][f"more{len(p.optimizer.state[p.model[0].weight])}"] = torch.zeros(2)
    return loss


def makes_state_cured(p, batch):
    loss = p.train(p.loss(batch))
    p.optimizer.state[p.model[0].weight].setdefault("more", torch.zeros(2))
    return loss


def calls_a_sink(p, batch):
    loss = p.train(p.loss(batch))
    SHOW(loss)  # here
    return loss


def calls_a_sink_cured(p, batch):
    loss = p.train(p.loss(batch))
    SHOW(loss.item(), "loss")
    return loss


COUNTED: dict[str, Any] = {"n": 0}


@torch.library.custom_op("refused::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    COUNTED["n"] += 1
    return x * 2


def counts_in_an_op(p, batch):
    return p.train(p.loss(counted(batch)))  # here


def counts_in_an_op_cured(p, batch):
    COUNTED["n"] += 1
    return p.train(p.loss(batch * 2))


def wraps_tensors(p, batch):  # here
    trained = p.optimizer.param_groups[0]["params"]
    if len(trained) == 4:
        trained.append(nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))))
    return p.train(p.loss(batch))


def wraps_tensors_cured(p, batch):
    trained = p.optimizer.param_groups[0]["params"]
    if len(trained) == 4:
        trained.append(nn.Parameter(torch.ones(2)))
    return p.train(p.loss(batch))


def returns_unseen(p, batch):
    loss = p.train(p.loss(batch))
    return {"loss": loss, "of": object}, {1, 2}  # here


def returns_unseen_cured(p, batch):
    loss = p.train(p.loss(batch))
    return {"loss": loss}, [1, 2]


def returns_attributes(p, batch):
    loss = p.train(p.loss(batch))
    loss.tag = "main"
    return loss  # here


def returns_attributes_cured(p, batch):
    return p.train(p.loss(batch)), "main"


def returns_a_graph(p, batch):
    p.train(p.loss(batch))
    return p.model(batch)  # here


def returns_a_graph_cured(p, batch):
    p.train(p.loss(batch))
    return p.model(batch).detach()


def retains_a_gradient(p, batch):
    out = p.model(batch)
    out.retain_grad()
    p.train(out.square().mean())
    return out  # here


def retains_a_gradient_cured(p, batch):
    out = p.model(batch)
    out.retain_grad()
    p.train(out.square().mean())
    return out.grad


def batch_unseen(p, batch):  # here
    return p.train(p.loss(batch[0]))


batch_unseen_cured = batch_unseen


def reads_an_appended_list(p, batch):
    loss = p.train(p.loss(batch))
    p.table["list"].append(loss.item())
    return len(p.table["list"])  # here


def reads_an_appended_list_cured(p, batch):
    loss = p.train(p.loss(batch))
    p.table["list"].append(loss.item())
    return loss


def runs_no_ops(p, batch):  # here
    return None


CODES = {"code": torch.zeros(6, requires_grad=True)}


def with_another_code(number: int) -> torch.Tensor:
    CODES["code"] = torch.full((6,), number / 10, requires_grad=True)
    return torch.randn(4, 6)


def trains_unseen(p, batch):  # here
    return p.train(p.loss(batch + CODES["code"]))


def trains_its_batch(p, batch):  # here
    return p.train(p.loss(batch.requires_grad_()))


def trains_its_batch_cured(p, batch):
    return p.train(p.loss(batch.detach().requires_grad_()))
