"""Parts of stacked parameters, and the way of their gradients back."""

from __future__ import annotations

import torch
from torch import nn

from hocket.fusion.gradients import Parts


def _parts(whole):
    return [own["weight"] for own in Parts().of({"weight": whole})]


def test_as_of_unbind():
    torch.manual_seed(0)
    whole, other = (nn.Parameter(torch.arange(12.0).view(6, 2)) for _ in range(2))
    for used in (slice(None), slice(0, 1), slice(1, None)):  # parts that nobody uses have no gradient
        factors = [torch.randn(2) for _ in range(6)]
        for parts, of in ((_parts(whole), whole), (other.unbind(0), other)):
            of.grad = None
            assert all(map(torch.equal, parts, of.unbind(0)))
            sum((part * factor).sum() for part, factor in list(zip(parts, factors, strict=False))[used]).backward()
        assert torch.equal(whole.grad, other.grad)


def test_gradients_can_be_differentiated_again():
    whole = nn.Parameter(torch.arange(1.0, 7.0).view(6, 1))
    loss = sum((part**3).sum() for part in _parts(whole))
    [grad] = torch.autograd.grad(loss, [whole], create_graph=True)
    grad.sum().backward()
    assert torch.equal(whole.grad, 6 * whole.detach())
