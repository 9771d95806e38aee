"""Graphs and uses that are not for this backend: eager's results, or torch's own error."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as mapped
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from hocket.profiling.exact_widths import same_bits
from support.regions import made_regions

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore:.*autograd.function.Function", "ignore:Sparse")
NUM_CALLS = 12


class _Plain(torch.Tensor):
    """A subclass without a dispatch of its own: ``aot_eager`` fails on it."""


class _TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")

    def forward(self, x: torch.Tensor) -> Any:
        return self.here(x).tanh().sum(), self.there(x.to("meta")).tanh()


def _chain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin().cos()


def _branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() - 1, (x,))


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


GRAPHS: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "complex": (lambda x: (x * 1j).exp().abs().sum(), lambda: torch.ones(3)),
    "complex input": (lambda x: (x * 2).exp().abs(), lambda: torch.ones(3, dtype=torch.complex64)),
    "sparse": (lambda x: torch.sparse.mm(x, torch.ones(3, 3)).sin().cos(), lambda: torch.eye(3).to_sparse()),
    "sparse result": (lambda x: x * 2 * 3, lambda: torch.eye(3).to_sparse()),
    "compressed": (lambda x: torch.mv(x, torch.ones(3)).sin().cos(), lambda: torch.eye(3).to_sparse_csr()),
    "nested": (_chain, _jagged),
    "subclass": (_chain, lambda: TwoTensor(torch.ones(3), torch.zeros(3))),
    "plain subclass": (_chain, lambda: torch.ones(3).as_subclass(_Plain)),
    "branch": (_branch, lambda: torch.ones(3)),
    "map": (lambda x: mapped(lambda row: row.sin() * 2, x).cos(), lambda: torch.ones(3, 2)),
    "another device": (_chain, lambda: torch.ones(3, device="meta")),
    "two devices": (_TwoDevices(), lambda: torch.ones(2, 4)),
}


@pytest.mark.parametrize("numerics", ["bitwise", "close"])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_cannot_be_planned_is_eagers(name: str, numerics: str) -> None:
    run, argument = GRAPHS[name]
    compiled = torch.compile(run, backend="hocket", options={"numerics": numerics})
    with made_regions():
        for _ in range(NUM_CALLS):
            found, expected = compiled(argument()), run(argument())
            assert all(map(_alike, tree_leaves(found), tree_leaves(expected)))


def test_sparse_gradients_are_eagers() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    compiled = torch.compile(lambda rows: table(rows).sin().cos(), backend="hocket")
    with made_regions() as regions:
        for _ in range(3):
            table.zero_grad()
            compiled(torch.tensor([1, 2])).sum().backward()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
    assert "a gradient is not dense" in regions[0].why


@pytest.mark.parametrize("fails", [False, True])
def test_beyond_the_recompilation_limit_it_is_eager_or_torchs_error(fails: bool) -> None:
    compiled = torch.compile(lambda x, factor: (x * factor).sin().cos(), backend="hocket", dynamic=False)
    limit = 3
    with made_regions(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=fails, recompile_limit=limit):
        for number in range(limit if fails else 2 * limit):
            x = torch.ones(2 + number)
            assert torch.equal(compiled(x, float(number)), (x * float(number)).sin().cos())
        if fails:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                compiled(torch.ones(1000), 1000.0)


@pytest.mark.parametrize("is_warm", [True, False])
def test_a_pool_of_threads_calls_a_model(is_warm: bool) -> None:
    model = _model()
    compiled = torch.compile(model, backend="hocket")

    def call(number: int) -> torch.Tensor:
        return compiled(torch.full((2, 4), number / 10))

    with made_regions(), ThreadPoolExecutor(4) as pool:
        if is_warm:
            list(map(call, range(30)))
        for number, found in enumerate(pool.map(call, range(60))):
            assert torch.equal(found, model(torch.full((2, 4), number / 10)))


def test_export_copy_and_pickle_of_a_compiled_model() -> None:
    model, x = _model(), torch.ones(2, 4)
    compiled = torch.compile(model, backend="hocket")
    with made_regions():
        for _ in range(30):
            compiled(x).sum().backward()
        expected = model(x)
        assert torch.equal(torch.export.export(compiled, (x,)).module()(x), expected)
        assert torch.equal(copy.deepcopy(compiled)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), expected)


def test_other_transforms_of_a_compiled_model() -> None:
    model, x = _model(), torch.ones(3, 2, 4)
    compiled = torch.compile(model, backend="hocket")
    with made_regions():
        for _ in range(NUM_CALLS):
            torch.testing.assert_close(torch.vmap(compiled)(x), torch.vmap(model)(x))
            found, expected = (torch.func.jvp(run, (x,), (x,)) for run in (compiled, model))
            assert all(map(_alike, found, expected))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _alike(found: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if type(found) is not type(expected) or found.layout is not expected.layout or found.device != expected.device:
        return False
    if expected.is_meta:
        return found.shape == expected.shape
    if isinstance(expected, TwoTensor):
        return _alike(found.a, expected.a) and _alike(found.b, expected.b)
    if expected.is_nested:
        return _alike(found.values(), expected.values())
    return same_bits(_dense(found), _dense(expected))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach().as_subclass(torch.Tensor)
    )
