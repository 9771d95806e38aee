"""Small products that are joined compute what they computed, in fewer products, and nothing waits longer."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hocket.tracing.compiling.products import join_products
from quick import some

aten = torch.ops.aten
Function = Callable[..., Sequence[torch.Tensor]]


def is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def traced(function: Function, *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, dtype=torch.float64) for shape in shapes))


def products(module: fx.GraphModule) -> int:
    return sum(node.target in (aten.mm.default, aten.addmm.default) for node in module.graph.nodes)


def check(function: Function, *shapes: tuple[int, ...]) -> tuple[int, int]:
    """Numbers of products before and after, of a graph that computes the same."""
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    plain, joined = traced(function, *shapes), traced(function, *shapes)
    join_products(joined.graph, is_random)
    joined.graph.lint()
    joined.recompile()
    results = []
    for module in (plain, joined):
        torch.manual_seed(1)
        results.append(module(*given))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert found.stride() == expected.stride()
    return products(plain), products(joined)


def recurrent(steps: int, draws: bool = False) -> Function:
    """A recurrent net, and the gradients of its weights and its inputs."""

    def step(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in (x, w, u, b)]
        x, w, u, b = leaves
        h = torch.zeros_like(x[0])
        for n in range(steps):
            given = torch.dropout(x[n], 0.5, True) if draws else x[n]
            h = torch.tanh(torch.nn.functional.linear(given, w, b) + torch.nn.functional.linear(h, u))
            h = h[:, : x.shape[-1]]
        return torch.autograd.grad(h.square().sum(), leaves)

    return step


CELL = ((5, 4, 24), (24, 24), (24, 24), (24,))


def test_the_products_of_a_recurrent_net_but_its_chains_are_joined() -> None:
    before, after = check(recurrent(5), *CELL)
    assert before == 10 + 9 + 10, "forward, gradients of states and inputs, of weights"
    chains = 5 + 4  # the state's own, forward and backward
    assert after == chains + 1 + 1 + 2, "and one for the inputs, one for their gradients, one for each weight"


def test_random_numbers_are_drawn_in_their_order() -> None:
    before, after = check(recurrent(5, draws=True), *CELL)
    assert after == before - 2 * 4 - 4, "the inputs are drawn one by one: only their gradients are joined"


def microbatches(count: int) -> Function:
    def step(x: torch.Tensor, *layers: torch.Tensor) -> Sequence[torch.Tensor]:
        weights = [each.detach().requires_grad_() for each in layers]
        total = torch.zeros((), dtype=x.dtype)
        for part in x.chunk(count):
            for weight in weights:
                part = torch.relu(part @ weight.t())
            total = total + part.sum()
        return torch.autograd.grad(total, weights)

    return step


def test_microbatches_share_the_first_layers_products_and_the_gradients_of_all() -> None:
    before, after = check(microbatches(4), (16, 32), (32, 32), (32, 32), (32, 32))
    assert before == 4 * (3 + 2 + 3)
    assert after == 1 + 4 * 2 + 4 * 2 + 3


def test_what_is_large_stays_as_it_is() -> None:
    before, after = check(microbatches(2), (128, 32), (32, 32), (32, 32))
    assert after == before


def test_a_sum_keeps_its_layout() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Sequence[torch.Tensor]:
        first, second = ((each.t() @ a.t()).t() for each in (b, b.cos()))
        return [(c + first + second).as_strided((16,), (1,))]

    check(function, (16, 2), (2, 16), (16, 16))


def copies(module: fx.GraphModule) -> int:
    return sum(node.target is aten.cat.default for node in module.graph.nodes)


def test_products_that_nothing_comes_before_are_joined_some_at_a_time() -> None:
    """Else the first cell would wait for the inputs of all."""
    before, after = check(recurrent(5), (5, 60, 240), *[(240, 240)] * 2, (240,))
    assert before - after == 2 + 4 + 8, "two, two and one for the inputs, one for their gradients and for each weight"


def test_a_matrix_that_many_products_read_transposed_is_copied_once() -> None:
    def read(shape: tuple[int, int], steps: int) -> int:
        def function(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
            for _ in range(steps):
                x = torch.tanh(x @ w.t())
            return (x,)

        check(function, shape, (12, 12))
        joined = traced(function, shape, (12, 12))
        join_products(joined.graph, is_random)
        rights = [node.args[-1] for node in joined.graph.nodes if node.target is aten.mm.default]
        return len(set(rights)) if copies(joined) else 0

    def heads(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
        found = [x]
        for _ in range(12):
            found.append(torch.tanh(found[-1] @ w.t()) * x)
        return found

    joined = traced(heads, (4, 12), (1, 12))
    join_products(joined.graph, is_random)
    assert not copies(joined), "of one column: it is the same either way"
    assert read((4, 12), 12) == 1
    assert read((4, 12), 11) == 0, "few products"
    assert read((129, 12), 12) == 0, "of many rows"


@pytest.mark.parametrize("seed", some(range(40)))
def test_random_graphs(seed: int) -> None:
    """Products, sums, transposes and functions of what there is, some of it drawn."""

    def function(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        choose = random.Random(seed)
        tall, wide, full = [given[0]], [given[1]], [given[2]]  # of 12 x 3, 3 x 12 and 12 x 12
        for _ in range(60):
            a, b, c, d = (choose.choice(each) for each in (tall, wide, full, full))
            match choose.randrange(10):
                case 0 | 1 | 2:
                    full.append(a @ b)
                case 3 | 4 | 5:
                    full.append(c + d)
                case 6:
                    tall.append(b.t())
                    wide.append(a.t())
                case 7:
                    full.append((b.t() @ a.t()).t())
                case 8:
                    wide += [torch.tanh(b @ c), torch.addmm(given[3], b, c) / 12]
                case _:
                    tall.append(torch.rand_like(a) * a)
        return [each.tanh() for each in choose.sample(full, 6)] + [tall[-1], wide[-1]]

    check(function, (12, 3), (3, 12), (12, 12), (12,))


def test_what_several_joined_products_multiply_is_copied_once() -> None:
    """The gradients of the states: for both weights' gradients, and for those of the inputs."""
    joined = traced(recurrent(5), *CELL)
    join_products(joined.graph, is_random)
    assert copies(joined) == 2 + 1 + 1, "of the inputs, in two orders, of the states, and of their gradients"
