"""Arguments of a step as one value, the batch, whose tensors and numbers are found by torch's pytree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Arguments(NamedTuple):
    """The arguments of a step, if they are not one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Unfolded:
    """A batch with objects in it that torch's pytree does not know. See `hocket.pystate.batches`."""

    value: Any  # the batch
    leaves: tuple[Any, ...]  # all that these objects hold
    tree: Any  # how


def is_size(value: Any) -> bool:
    """Return True for a `torch.Size`, of which torch's pytree makes a plain tuple when it puts it together again."""
    return type(value) is torch.Size


def packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pack all arguments into one value. A single positional argument stays as it is."""
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def unpacked(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `packed` was given."""
    return (batch.args, batch.kwargs) if type(batch) is Arguments else ((batch,), {})


def spreading(step: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return `step` as a function of one packed value."""

    def spread(batch: Any) -> Any:
        if type(batch) is Unfolded:
            batch = batch.value
        return step(*batch.args, **batch.kwargs) if type(batch) is Arguments else step(batch)

    spread.__wrapped__ = step  # type: ignore[attr-defined]
    return spread
