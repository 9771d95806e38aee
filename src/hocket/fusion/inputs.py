"""Tensors of each model ``(B, N, ...)`` separated from those of all models ``(N, ...)``.

Only a tensor whose first axis is B can be the former. Which it is, the first call settles, and later calls hold to it:

    first call  (16, 5, 6), B = 8    one batch for all: one model takes 3 axes
    later       (8, 5, 6)            3 axes, so one batch for all, though there are 8 models
                (8, 16, 5, 6)        4 axes, so one batch for each model

A first call whose first axis happens to be B is tried on the meta device, once on the input as it stands, once on its
first part. Where both work, as for a linear layer, nothing is guessed: ``fuse(..., shared=True)`` or ``False`` says it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import fallback
from hocket.fusion.stacked import Stacked, unwatched
from hocket.fusion.store import Store
from hocket.pystate.origins import level_of_user

MAX_COMBINATIONS = 64
BATCHED: dict[type[nn.Module], tuple[int, ...]] = {
    **dict.fromkeys((nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.LSTM, nn.GRU, nn.RNN), (3,)),
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), (4,)),
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d, nn.AvgPool3d), (5,)),
    **dict.fromkeys((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), (3,)),
    nn.Linear: (2, 3, 4, 5, 6, 7),
}
ASK = "say which with fuse(..., shared=True) for one of all models, or shared=False for one of each"


class ModelAxis:
    """The axes of the arguments of an array and of its losses, as far as they are known. `shared` is as in `fuse`."""

    def __init__(self, shared: bool | Mapping[str, bool] | None) -> None:
        self.shared = shared
        self._ranks: dict[Any, set[int]] = {}  # of what one model takes, by argument
        self._guessed: list[Any] = []  # targets of the last loss that were read as of each model because of B alone

    def inputs(self, store: Store, leaves: list[Any], spec: Any) -> tuple[bool, ...]:
        """For each leaf of the arguments, True if its first axis is the models' axis."""
        kind, num_models = str(spec), store.num_models
        said: list[bool | None] = [self.shared if isinstance(self.shared, bool) else None] * len(leaves)
        if isinstance(self.shared, Mapping):
            said = _by_name(store.templates[0], spec, self.shared)
        for leaf, each in zip(leaves, said, strict=True):
            if each is not True:
                _check_divisible("input", leaf, num_models, "fuse(..., shared=True)")
        own = [
            self._held((kind, place), leaf, num_models)
            if said[place] is None
            else self._said(said[place], leaf, num_models)
            for place, leaf in enumerate(leaves)
        ]
        open_places = [place for place, each in enumerate(own) if each is None]
        if open_places:
            choices = islice(product((True, False), repeat=len(open_places)), MAX_COMBINATIONS)
            readings = [dict(zip(open_places, choice, strict=True)) for choice in choices]
            works = [
                reading
                for reading in readings
                if _works(store.on_meta(0), leaves, spec, [reading.get(place, each) for place, each in enumerate(own)])
            ]
            if len(works) != 1:
                shapes = ", ".join(str(tuple(leaves[place].shape)) for place in open_places)
                how = "both readings run" if works else "no reading runs on tensors without data"
                raise InputError(f"input of shape {shapes}: of all {num_models} models, or of each? {how}; {ASK}")
            for place, each in works[0].items():
                own[place] = each
                self._settle((kind, place), leaves[place], each)
        return tuple(map(bool, own))

    def targets(
        self, fn: Callable[..., Any], targets: tuple[Any, ...], output: Any, shape: Sequence[int], num_models: int
    ) -> tuple[Any, ...]:
        """Targets of a loss, `Stacked` where models have their own."""
        self._guessed.clear()
        code = getattr(fn, "__code__", None)  # not itself part of the key, which is saved with the array
        named = type(fn).__qualname__ if code is None else (code.co_filename, code.co_firstlineno)
        if all(type(leaf) is Tensor and (not leaf.ndim or leaf.shape[0] != num_models) for leaf in targets):
            for place, leaf in enumerate(targets):
                self._settle((named, len(targets), place), leaf, False)
            return targets
        leaves, spec = pytree.tree_flatten(targets)
        kind = (named, len(leaves))
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                _check_divisible("loss: target", leaf, num_models, "functools.partial of the loss function")
                continue
            is_own = self._held((*kind, place), leaf, num_models)
            if is_own is None:
                is_new = (*kind, place) not in self._ranks
                is_own, is_guess = self._is_own_target(fn, leaves, place, spec, output, tuple(shape))
                self._settle((*kind, place), leaf, is_own)
                self._guessed += [(*kind, place)] * (is_guess and is_new)
            if is_own:
                leaves[place] = Stacked(leaf)
        return pytree.tree_unflatten(leaves, spec)

    def reads_otherwise(self) -> bool:
        """Read what was a guess in the last loss, which has failed, the other way. Returns False if nothing was one."""
        for key in self._guessed:
            self._ranks[key] = {rank + 1 for rank in self._ranks[key]}
        return bool(self._guessed)

    def _said(self, is_shared: bool | None, leaf: Any, num_models: int) -> bool:
        """True if the user has declared that a leaf has a model axis. Its first axis is checked."""
        if is_shared or not isinstance(leaf, Tensor):
            return False
        if leaf.ndim == 0 or leaf.shape[0] != num_models:
            shape = tuple(leaf.shape) if leaf.ndim else "a tensor without axes"
            raise InputError(f"input: expected {num_models} models in the first axis, got shape {shape}")
        return True

    def _held(self, key: Any, leaf: Any, num_models: int) -> bool | None:
        """True if a leaf has a model axis, judged by its shape and earlier calls, or None if these leave it open."""
        if not isinstance(leaf, Tensor):
            return False
        if leaf.ndim == 0 or leaf.shape[0] != num_models:
            self._settle(key, leaf, False)
            return False
        ranks = self._ranks.get(key, set())
        is_shared, is_own = leaf.ndim in ranks, leaf.ndim - 1 in ranks
        return is_own if is_shared is not is_own else None

    def _settle(self, key: Any, leaf: Tensor, is_own: bool) -> None:
        self._ranks.setdefault(key, set()).add(leaf.ndim - is_own)

    def _is_own_target(
        self, fn: Callable[..., Any], leaves: list[Any], place: int, spec: Any, output: Any, out: tuple[int, ...]
    ) -> tuple[bool, bool]:
        """Two answers: True if a target with B in its first axis is one of each model, and True if that is a guess."""
        shape = tuple(leaves[place].shape)
        like_own = (len(shape) > 1 and shape[:2] == out[:2]) or shape == out
        like_shared = len(out) > 1 and shape[0] == out[1] and len(shape) < len(out)
        if like_own is not like_shared:
            return like_own, False
        if not like_own:
            if shape[0] in out[2:]:
                warnings.warn(
                    f"loss: target of shape {shape}, output {out}: read as one of each of {shape[0]} models; weights "
                    "of classes, which all have in common, are for the loss function to bring (functools.partial)",
                    stacklevel=level_of_user(),
                )
            return True, True
        if isinstance(self.shared, bool):
            return not self.shared, False
        works = []
        for is_own in (True, False):
            given = [leaf.tensor[0] if isinstance(leaf, Stacked) else leaf for leaf in leaves]
            given[place] = leaves[place][0] if is_own else leaves[place]
            try:
                with torch.no_grad():
                    fn(output, *pytree.tree_unflatten(given, spec))
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            works.append(is_own)
        if len(works) != 1:
            raise InputError(f"loss: target of shape {shape}, output {out}: of all {out[0]} models, or of each? {ASK}")
        return works[0], False


def _check_divisible(what: str, leaf: Any, num_models: int, hands_over: str) -> None:
    """Refuse an object with a tensor that may be one of each model, since all models would get it as it is."""
    if isinstance(leaf, Tensor) or not fallback.holds_tensors(leaf):
        return
    if any(isinstance(each, Tensor) and each.shape[:1] == (num_models,) for each in pytree.tree_leaves(vars(leaf))):
        raise InputError(
            f"{what}: a {type(leaf).__name__} holds tensors that begin with {num_models}, of all models or of each; if "
            "each has its own, and it is a dataclass, torch.export.register_dataclass makes it known; "
            f"{hands_over} hands it to all models as it is"
        )


def _by_name(template: nn.Module, spec: Any, shared: Mapping[str, bool]) -> list[bool | None]:
    """For each leaf of the arguments, what was said of the argument that it belongs to."""
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names = list(inspect.signature(template.forward).parameters)
    unknown = set(shared) - set(names)
    if unknown:
        raise InputError(f"shared: no argument is called {sorted(unknown)[0]!r}; there are {', '.join(names)}")
    said: list[bool | None] = [None] * spec.num_leaves
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for place in pytree.tree_leaves(value):
            said[place] = shared.get(name)
    return said


def _works(model: nn.Module, leaves: list[Any], spec: Any, choice: Sequence[bool | None]) -> bool:
    """True if the model takes these inputs, with a batch axis where a layer has one."""
    with unwatched(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        filled = [
            torch.empty(tuple(leaf.shape[1:] if own else leaf.shape), dtype=leaf.dtype, device="meta")
            if isinstance(leaf, Tensor)
            else leaf
            for leaf, own in zip(leaves, choice, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        for module in model.modules():
            if type(module) in BATCHED:
                module.register_forward_pre_hook(_needs_batch)
        try:
            model(*args, **kwargs)
        except (_Unbatched, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
            return False
    return True


class _Unbatched(Exception):  # noqa: N818  (a signal, not an error)
    """A layer was given an example without a batch."""


def _needs_batch(module: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor) and args[0].ndim not in BATCHED[type(module)]:
        raise _Unbatched
