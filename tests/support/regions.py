"""Programs run by eager and by regions on the same data: all that they leave behind."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.dynamo import region
from hocket.dynamo.contest import Contest
from hocket.profiling.exact_widths import same_bits


@contextmanager
def made_regions(*, guard: bool = False, takes_turns: bool | None = None) -> Iterator[list[region.Region]]:
    """The regions that are made within. Without a guard, plans run whatever they cost.

    Without turns, which by default a guard alone asks for, the compiled graph stays where a region has a plan.
    """
    found: list[region.Region] = []
    config, start = region._config, region.Region.__init__

    def unguarded(*args: Any) -> Any:
        return replace(config(*args), guard=guard)

    def noted(self: region.Region, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        found.append(self)

    plays = guard if takes_turns is None else takes_turns
    take_turn = Contest._take_turn if plays else lambda self: self._keep_compiled("")
    with (
        mock.patch.object(Contest, "_take_turn", take_turn),
        mock.patch.object(region, "_config", unguarded),
        mock.patch.object(region.Region, "__init__", noted),
    ):
        yield found


def run_program(
    make: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Any, ...]],
    backend: str | None,
    num_calls: int,
    **options: Any,
) -> list[Any]:
    """Everything that a program leaves behind in each call: results, gradients, state and the random state.

    In every third call the last of its results alone gets a gradient.

    Args:
        make: the program, the same each time.
        batch: its arguments in a call.
        backend: None: as it stands.
        num_calls: how many calls.
        options: for `torch.compile`.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    run = model if backend is None else torch.compile(model, backend=backend, **options)
    seen: list[Any] = []
    for number in range(num_calls):
        args = copy.deepcopy(batch(number))
        model.zero_grad()
        result = run(*args)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        tensors = tensors[-1:] if number % 3 == 2 else tensors  # gradients for some of the results
        if tensors:
            torch.stack([(tensor * tensor).sum().double() for tensor in tensors]).sum().backward()
        leaves = [*tree_leaves(result), *tree_leaves(args)]
        gradients = [leaf.grad for leaf in (*leaves, *model.parameters()) if _is_leaf(leaf)]
        found = [*leaves, *gradients, *model.state_dict().values(), torch.get_rng_state()]
        seen += [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in found]
    return seen


def same(first: list[Any], second: list[Any]) -> bool:
    """Return True if two programs have left the same bits."""
    return len(first) == len(second) and all(map(_alike, first, second))


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    return one.stride() == other.stride() and same_bits(one, other)
