"""Steps that keep, hand on and return tensors which a graph reads or makes: all stay what eager leaves them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.steps import update
from support.strict_cuda import StrictCuda
from support.strict_twins import NUM_STEPS, same, scheduled

ZEROS = torch.zeros(4, 8)


def loss_of(net: Any, optimizer: Any, *inputs: torch.Tensor) -> torch.Tensor:
    return update(optimizer, net.linear(sum(inputs)).square().mean()).detach()


def hands_on(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    loss = loss_of(net, optimizer, batch, net.first, net.second)
    net.first, net.second = net.second, batch * 2
    return loss


def keeps_gradient(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    if net.linear.weight.grad is not None:
        net.first = net.linear.weight.grad
    return loss_of(net, optimizer, batch, net.first[:1])


def queues(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    loss = loss_of(net, optimizer, batch, *net.queue)
    net.queue = (*net.queue[1:], batch.mean(0, keepdim=True))
    return loss


def reads_late(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    """The factor is another number in each step, so its product is made after the graph."""
    old, loss = net.first, loss_of(net, optimizer, batch)
    net.first, net.count = batch.tanh(), net.count + 1
    return loss, old * net.count


def returns_old(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    old, loss = net.first, loss_of(net, optimizer, batch, net.first)
    net.first = batch.tanh()
    return loss, old, old[:2]


def only_keeps(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    net.first = batch.tanh().detach()
    return loss_of(net, optimizer, batch)


def moves_and_returns(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    moved = batch.to(torch.float32)  # what `.to(device)` is here
    net.first = moved[:1]
    return loss_of(net, optimizer, moved), moved


def moves_and_writes(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    moved = batch.to(torch.float32)
    other = moved * 3
    moved[:2].mul_(0.5)
    return loss_of(net, optimizer, moved, other), moved


def plain(net: Any, optimizer: Any, batch: torch.Tensor) -> Any:
    return loss_of(net, optimizer, batch)


def expanded(number: int) -> torch.Tensor:
    return torch.randn(1, 8).expand(4, 8)


def on_host(number: int) -> torch.Tensor:
    return torch.randn(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("step", "batch"),
    [
        *((step, lambda number: torch.randn(4, 8)) for step in (hands_on, keeps_gradient, queues, reads_late)),
        *((step, lambda number: torch.randn(4, 8)) for step in (returns_old, only_keeps)),
        *((step, on_host) for step in (moves_and_returns, moves_and_writes)),
        (plain, expanded),
    ],
)
def test_what_outlives_a_step_is_not_written_over(step: Callable[..., Any], batch: Callable[[int], Any]) -> None:
    device, nets = StrictCuda(), []
    torch.manual_seed(0)
    net: Any = nn.Module()
    net.linear, net.count = nn.Linear(8, 4), 0
    net.first, net.second, net.queue = ZEROS.clone(), ZEROS.clone(), (ZEROS[:1].clone(), ZEROS[1:2].clone())
    for _ in range(2):
        nets.append((net, torch.optim.SGD(net.parameters(), lr=0.1)))
        net = copy.deepcopy(net)
    fast = scheduled(lambda batch: step(*nets[1], batch), *nets[1], device)
    expected, found = [], []
    for number in range(NUM_STEPS):
        batches = [(torch.manual_seed(number), batch(number))[1] for _ in nets]
        if batch is on_host:
            device.on_host(batches[1])
        expected.append(copy.deepcopy(step(*nets[0], batches[0])))
        found.append(fast(batches[1]))
        assert all(same(getattr(nets[0][0], name), getattr(nets[1][0], name)) for name in ("first", "second")), number
        assert same(list(nets[0][0].queue), list(nets[1][0].queue)), number
    assert all(
        same(list(one), list(other)) for one, other in zip(expected, found, strict=True) if isinstance(one, tuple)
    )
    assert same(*(list(each.state_dict().values()) for each, _ in nets))
    assert fast.verdict == "planned"
    assert device.num_replays >= NUM_STEPS - 20, "the graph is neither captured nor left out again and again"
    assert device.num_captures <= 10
