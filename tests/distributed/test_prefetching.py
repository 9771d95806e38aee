"""FSDP2's lists, filled by the order of use and the memory; two processes on gloo."""

import pytest
import torch
from torch import nn

from distributed.ranks import returned
from hocket.distributed.prefetching import ahead, prefetch
from support.refusals import refused


class Net(nn.Module):
    """Layers that are not used in the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        for place in (2, 0, 3, 1):
            x = torch.tanh(self.layers[place](x))
        return self.last(x)


def trained(is_prefetched, memory_bytes):
    """Three steps; what was set, and the parameters."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = prefetch(model, memory_bytes=memory_bytes) if is_prefetched else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 16).view(2, 8)).sum().backward()
        optimizer.step()
    values = [parameter.full_tensor().detach().tolist() for parameter in model.parameters()]
    return found, values, model


def rank_of_fsdp(rank, say):
    torch.distributed.init_process_group("gloo")
    layer_bytes = 4 * (8 * 8 + 8)
    _, plain, _ = trained(False, 0)
    found, values, model = trained(True, 2 * layer_bytes)
    assert values == plain
    names = {module: name for name, module in model.named_modules()}
    states = {module._get_fsdp_state(): names[module] for module in names if hasattr(module, "_get_fsdp_state")}
    for name, others in found.forward.items():
        state = model.get_submodule(name)._get_fsdp_state()
        assert tuple(states[each] for each in state._states_to_forward_prefetch) == others
        assert tuple(states[each] for each in state._states_to_backward_prefetch) == found.backward[name]
    torch.distributed.destroy_process_group()
    return found.order, found.forward, found.backward


def test_lists_follow_the_order_of_use_and_the_memory():
    first, second = returned(rank_of_fsdp, 2)
    assert first == second
    order, forward, backward = first
    assert order == ("", "layers.2", "layers.0", "layers.3", "layers.1")
    assert forward[""] == ("layers.2", "layers.0")
    assert forward["layers.2"] == ("layers.0", "layers.3")
    assert forward["layers.1"] == ()
    assert backward["layers.1"] == ("layers.3", "layers.0")


@pytest.mark.parametrize(("memory_bytes", "first"), [(0, ()), (4, ("b",)), (11, ("b",)), (12, ("b", "c"))])
def test_what_is_gathered_ahead_fits_into_the_memory(memory_bytes, first):
    assert ahead(["a", "b", "c"], {"a": 4, "b": 4, "c": 8}, memory_bytes)["a"] == first


def test_what_is_not_sharded_is_refused():
    refused("Net is not sharded; call torch", prefetch, Net(), memory_bytes=1)
