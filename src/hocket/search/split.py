"""Hyper-parameters that may differ between fused models, separated from those that may not.

HFHT (Wang et al., MLSys 2021, Appendix E) calls them fusible and infusible, and asks the user. Here they are found: the
user's function is called with one parameter changed at a time, on the meta device, where tensors have shapes and no
data, and the signatures are compared::

    base    lr 0.1   width 32   -->  0.weight (32, 8), ...
    lr      lr 0.3   width 32   -->  the same: fusible
    width   lr 0.1   width 64   -->  0.weight (64, 8), ...: infusible

A parameter may also matter only beside another one (the width of a layer that is there for depth 2). So every trial is
compared with its group again when it is built. This here only says how to form groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.errors import InputError
from hocket.search.data import RandomState
from hocket.search.hyperparameters import Hyperparameters
from hocket.search.signature import Signature, difference, is_on_meta, options_of, signature
from hocket.search.training import Training

Train = Callable[[dict[str, Any]], Training]


@dataclass(frozen=True)
class Split:
    """The parameters of a space, in two parts."""

    fusible: tuple[str, ...]  # names of those that may differ inside a fused group
    infusible: tuple[str, ...]  # names of those that a group agrees on
    why: Mapping[str, str] = field(default_factory=dict)  # for each infusible one what differed, in words
    options: frozenset[str] = frozenset()  # names of the optimizer's numbers that the fusible ones change

    def key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that trials of one group share."""
        return tuple(_hashable(params.get(name)) for name in self.infusible)


def _hashable(value: Any) -> Any:
    return value if value.__hash__ is not None and not isinstance(value, tuple) else repr(value)


def built(train: Train, params: Mapping[str, Any], seed: int, device: str | None = None) -> Training:
    """The user's Training for these parameters, built with seeded generators that are put back after it."""
    given = params if isinstance(params, Hyperparameters) else Hyperparameters(params)
    with RandomState(seed).active():
        if device is None:
            made = train(given)
        else:
            with torch.device(device):
                made = train(given)
    if not isinstance(made, Training):
        raise InputError(
            f"train: expected it to return hocket.Training(...), got a value of type {type(made).__name__}"
        )
    if device is None and is_on_meta(made):
        raise InputError(
            "train: its tensors are on the meta device, where there is no data: it seems to keep what it made when it "
            "was called there to see what changes shapes; say which parameters do not, with fusible=[...]"
        )
    return made


def find_split(
    train: Train,
    space: Mapping[str, Any],
    base: Mapping[str, Any],
    seed: int = 0,
    declared: Sequence[str] | None = None,
) -> Split:
    """Find the fusible parameters of a space, or take the user's word for them.

    Args:
        train: the user's function.
        space: Optuna's distributions by name.
        base: one set of parameters, which is built as it is. The others differ from it in one parameter.
        seed: of the generators while they are built.
        declared: names that the user declares fusible. All others are infusible then.

    Raises:
        InputError: a declared name that is not in the space, or whose values change shapes. The message names it.

    Example:
        >>> from optuna.distributions import FloatDistribution, IntDistribution
        >>> def train(params):
        ...     model = torch.nn.Linear(2, params["width"])
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        ...     loss = lambda outputs, target: (outputs.sum(1) - target).square().mean()
        ...     return Training(model, optimizer, loss, [(torch.ones(4, 2), torch.ones(4))], metric=loss)
        >>> split = find_split(
        ...     train, {"lr": FloatDistribution(0.1, 1), "width": IntDistribution(1, 8)}, {"lr": 0.2, "width": 4}
        ... )
        >>> split.fusible, split.infusible, split.options
        (('lr',), ('width',), frozenset({'lr'}))
    """
    if declared is not None:
        unknown = [name for name in declared if name not in space]
        if unknown:
            raise InputError(f"fusible: expected names among {', '.join(space)}, got {unknown[0]!r}")
    first = built(train, base, seed)
    lines, numbers = signature(first), options_of(first)
    why: dict[str, str] = {}
    changed: set[str] = set()
    for name in space if declared is None else declared:
        for value in _values(space[name]):
            if value == base.get(name):
                continue
            found = _probe(train, {**base, name: value}, seed)
            if isinstance(found, str):
                why[name] = f"{name}={value!r} cannot be built: {found}"
            elif differs := difference(lines, found[0]):
                why[name] = differs
            else:
                changed |= {
                    key for mine, its in zip(numbers, found[1], strict=True) for key in mine if mine[key] != its[key]
                }
            if name in why:
                break
    for name in declared or ():
        if name in why:
            raise InputError(f"fusible: {name!r} was declared fusible, and is not: {why[name]}")
    fusible = tuple(name for name in (space if declared is None else declared) if name not in why)
    return Split(fusible, tuple(name for name in space if name not in fusible), why, frozenset(changed))


def suggest_all(train: Train, proposal: Hyperparameters, seed: int) -> None:
    """Let a user's function ask for its parameters, without data where it can be built so."""
    try:
        built(train, proposal, seed, "meta")
    except Exception:  # noqa: BLE001 - what needs data cannot be built without; what is asked for already stays
        built(train, proposal, seed)


def _probe(train: Train, params: Mapping[str, Any], seed: int) -> tuple[Signature, list[dict[str, Any]]] | str:
    """The signature and the optimizer's numbers for these parameters, or why they cannot be built."""
    for device in ("meta", None):  # what needs data cannot be built without
        try:
            made = built(train, params, seed, device)
            return signature(made), options_of(made)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and a trial then fails alone
            problem = f"{type(error).__name__}: {error}"
    return problem


def _values(distribution: Any) -> list[Any]:
    """Values that show what a parameter changes: all choices, or both ends."""
    choices = getattr(distribution, "choices", None)
    return list(choices) if choices is not None else [distribution.low, distribution.high]
