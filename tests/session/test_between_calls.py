"""Changes between two calls (kinds of batches and values, classes, attributes, precisions): each call is as eager's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hocket
import session.between_calls_of_batches  # noqa: F401  # adds its cases, and those of `between_calls_of_kinds`
from quick import covering
from session.between_calls import CALLS, CASES, CHANGES, Program

pytestmark = pytest.mark.usefixtures("one_thread", "one_core")


MODES = {"default": {}, "plan": {"guard": False, "planner": "serial"}}


def _told(made: Program, options: dict[str, Any] | None) -> Iterator[Any]:
    """Results, states, kinds and errors of each call of one run."""
    calls = 0
    own = made.step

    def step(batch: Any) -> Any:
        return own(batch)

    fast = step if options is None else hocket.schedule(step, made.model, made.optimizer, cache=False, **options)
    batches = [torch.randn(4, 6) for _ in range(5)]
    for call in range(CALLS):
        if call in CHANGES:
            made.change(CHANGES.index(call))
        try:
            with made.around(call):
                result = fast(made.batch(call, batches[call % 5]))
        except Exception as error:  # noqa: BLE001  # eager's own is compared
            yield f"call {call}", type(error), str(error)
            continue
        calls += 1
        made.after(result)
        leaves = torch.utils._pytree.tree_leaves(result)
        yield f"call {call}", [(type(leaf), leaf.requires_grad, leaf.detach().clone()) for leaf in leaves]
        yield f"state {call}", {name: value.clone() for name, value in made.model.state_dict().items()}
        yield f"strides {call}", [parameter.stride() for parameter in made.model.parameters()]
    yield (
        "numbers",
        [
            str(each) if isinstance(each, torch.library.Library) else each
            for each in made.numbers
            if type(each) is not torch.library.Library
        ],
    )
    if options is not None:
        fast.close()


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@pytest.mark.parametrize(("name", "mode"), covering(CASES, MODES))
def test_each_call_is_eager_s(name: str, mode: str) -> None:
    torch.manual_seed(0)
    eager = list(_told(CASES[name](), None))
    torch.manual_seed(0)
    for expected, found in zip(eager, _told(CASES[name](), MODES[mode]), strict=True):
        assert _same(expected, found), (expected, found)
