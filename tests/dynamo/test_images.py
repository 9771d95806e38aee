"""Networks of images through AOTAutograd: averages are written in place, and images may have their channels last."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from hocket.dynamo.graphs import boxed, partitioned

aten = torch.ops.aten


class Net(nn.Module):
    """Convolutions and norms, with what a test adds between them and the end."""

    def __init__(self, middle: Any = nn.Identity, end: Any = None, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8, **options), nn.BatchNorm2d(8, **options)
        self.middle, self.end, self.head = middle(), end, nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.other(self.second(self.middle(x))))
        return self.end(self, x) if self.end else self.head(x.mean((2, 3)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x))


class Drop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3) * torch.rand_like(x)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x += 1
        return F.elu(x, inplace=True)


def strided(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 8), (8, 1))


CASES = {
    "usual": Net,
    "an image": partial(Net, end=lambda net, x: x),
    "rows": partial(Net, end=lambda net, x: x.flatten(2).transpose(1, 2).reshape(-1, 8).view(-1, 4, 2)),
    "averages are read": partial(Net, end=lambda net, x: x.mean() * net.norm.running_mean.sum()),
    "averages and an image": partial(Net, end=lambda net, x: (x, x.permute(0, 2, 3, 1), net.norm.running_var * 2)),
    "a strided view": partial(Net, end=strided),
    "a norm twice": partial(Net, Twice),
    "random numbers": partial(Net, Drop),
    "in place": partial(Net, InPlace),
    "pools": partial(Net, middle=lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1))),
    "a transposed convolution": partial(Net, middle=lambda: nn.ConvTranspose2d(8, 8, 3, padding=1)),
    "groups": partial(Net, middle=lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    "no averages": partial(Net, track_running_stats=False),
    "no weights": partial(Net, affine=False),
    "evaluation": lambda: Net().eval(),
}


def through(net: nn.Module, targets: dict[str, list[Any]], **options: Any) -> Any:
    """The network by AOTAutograd's graphs, with the ops of each of them."""

    def compiled(graph: Any, _: Any, kind: str) -> Any:
        targets[kind] = [node.target for node in graph.graph.nodes]
        call = boxed(graph)

        def run(inputs: list[Any]) -> Any:
            return call(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(
        fw_compiler=partial(compiled, kind="forward"),
        bw_compiler=partial(compiled, kind="backward"),
        partition_fn=partial(partitioned, **options),
        keep_inference_input_mutations=True,
    )
    return torch.compile(net, backend=backend)


def trained(net: nn.Module, run: Any, layout: Any) -> dict[str, Any]:
    """Three steps with an image that gets a gradient: all that is left behind."""
    left: dict[str, Any] = {}
    torch.manual_seed(1)
    for number in range(3):
        x = torch.randn(4, 3, 6, 6).contiguous(memory_format=layout).requires_grad_()
        results = run(x)
        for place, result in enumerate(results if isinstance(results, tuple) else (results,)):
            left[f"result {number}.{place}"] = result.detach()
            (result**2).sum().backward(retain_graph=True) if result.requires_grad else None
        left[f"gradient {number}"] = x.grad
    left |= {name: value.grad for name, value in net.named_parameters()}
    return {**left, **net.state_dict(), "random state": torch.get_rng_state()}


@pytest.mark.parametrize("lays_out", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_network_trains_as_in_eager(name: str, lays_out: bool) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(CASES[name]())
    layout = torch.channels_last if name == "pools" else torch.contiguous_format
    targets: dict[str, list[Any]] = {}
    expected = trained(nets[0], nets[0], layout)
    found = trained(nets[1], through(nets[1], targets, lays_out=lays_out), layout)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (value is None) == (found[key] is None), key
        if value is None:
            continue
        assert found[key].stride() == value.stride(), key
        torch.testing.assert_close(found[key], value, **({} if lays_out else {"rtol": 0, "atol": 0}), msg=key)
    is_functional = aten._native_batch_norm_legit_functional.default in targets["forward"]
    assert is_functional == (name in ("averages are read", "averages and an image", "a norm twice"))
    assert (aten.contiguous.default in targets["backward"]) == (
        lays_out and name not in ("a strided view", "averages and an image")  # which has another layout
    )
