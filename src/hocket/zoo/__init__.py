"""Models and data for benchmarks, demos and tests, each ready to train.

    job = hocket.zoo.load("resnet20", batch_size=32)
    loss = job.step(job.batch(0))

Nothing here downloads anything. Images and tokens are generated from the seed, with a structure that a model can learn.
``digits-cnn`` trains on the handwritten digits that come with scikit-learn. The first axis of every tensor in a batch
counts its examples.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo.base import Option, Request, ZooEntry, checked_integer

if TYPE_CHECKING:
    import torch

__all__ = ["Option", "ZooEntry", "entries", "load"]

MAX_SEED = 2**63 - 1


def entries() -> Mapping[str, ZooEntry]:
    """Return all entries by name, from the smallest step to the largest. Loads torch, but no optional package."""
    from hocket.zoo.table import ENTRIES

    return MappingProxyType({entry.name: entry for entry in ENTRIES})


def load(
    name: str,
    *,
    batch_size: int | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    seed: int = 0,
    num_batches: int | None = None,
    device: str | torch.device = "cpu",
    **size: int,
) -> Job:
    """Build the entry ``name`` and return its job.

    ``batch_size``, ``optimizer`` ("sgd", "adam" or "adamw"), ``lr`` (the learning rate) and ``num_batches``
    default to the entry's own. ``size`` takes the entry's own options, such as ``image_size`` in pixels.
    Raises `InputError` for an unknown entry or option, or a number out of bounds.

    The same arguments give the same initial parameters and batches, bit for bit, on every device. The caller's random
    state is left as it was. A step that draws random numbers (dropout, a GAN's noise) draws them from torch's global
    generator, as any training step does.

        >>> job = load("mlp", depth=4, width=64, optimizer="adam", seed=7)
        >>> job.step(job.batch(0)).shape
        torch.Size([])
    """
    from hocket.zoo import training

    entry = _entry(name)
    checked_integer(f"{name}: seed", seed, minimum=0, maximum=MAX_SEED)
    request = Request(
        name=name,
        batch_size=_or_default(f"{name}: batch_size", batch_size, entry.batch_size),
        num_batches=_or_default(f"{name}: num_batches", num_batches, entry.num_batches),
        seed=seed,
        device=_device(name, device),
        optimizer=partial(training.make_optimizer, *_optimizer(entry, optimizer, lr)),
        size=entry.sized(size),
    )
    return request.build(entry)


def _entry(name: str) -> ZooEntry:
    known = entries()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise InputError(f"no zoo entry is called {name!r}: {hint}`hocket zoo` lists them all")


def _or_default(what: str, value: int | None, default: int) -> int:
    return default if value is None else checked_integer(what, value, minimum=1)


def _device(name: str, device: str | torch.device) -> torch.device:
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{name}: device: expected one such as 'cpu' or 'cuda:0', got {device!r}") from error


def _optimizer(entry: ZooEntry, name: str | None, lr: float | None) -> tuple[str, float]:
    """Return the optimizer's name and rate. The entry's own rate is only for the entry's own optimizer."""
    from hocket.zoo import training

    chosen = entry.optimizer if name is None else name
    default_lr = entry.lr if chosen == entry.optimizer else training.default_lr(chosen)
    return chosen, training.checked_lr(default_lr if lr is None else lr)
