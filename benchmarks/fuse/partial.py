"""Partial fusion (HFTA, section 5.4): at first one block of a model is fused, then one more at a time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from torch import nn

from benchmarks.fuse.targets import named, partly_fused, step_of
from benchmarks.fuse.timing import check_device, row_of, timed
from benchmarks.fuse.training import SHARED, Training
from hocket.errors import InputError

__all__ = ["blocks_of", "partial"]


def partial(
    target: str, *, device: str = "cpu", size: int = 4, steps: int = 7, training: Training = SHARED
) -> list[dict[str, Any]]:
    """Partial fusion: at first only one block is fused, then one more at a time (HFTA, section 5.4).

    Args:
        target: a name in `TARGETS` with one model, or of a zoo entry that classifies.
        device: as of `run`.
        size: B.
        steps: as of `run`.
        training: how they are trained.

    Returns:
        A row for each number of fused blocks: ``fused``, ``separate`` (the blocks' names), ``step_ms``,
        ``to_serial``.

    Raises:
        InputError: the device is not there, the target is unknown, or is two models.
    """
    check_device(device)
    chosen = named(target)
    models = chosen.models(0, device)
    if len(models) != 1:
        raise InputError(f"bench fuse: {target}: expected one model for partial fusion, got {len(models)}")
    blocks = blocks_of(models[0])
    rows: list[dict[str, Any]] = [
        {"fused": number, "separate": list(blocks[number:])} for number in range(1, len(blocks) + 1)
    ]
    in_turn: dict[str, Callable[[], None]] = {"serial": step_of("serial", chosen, size, device, training)}
    for row in rows:
        in_turn[str(row["fused"])] = partly_fused(chosen, size, device, training, tuple(blocks[row["fused"] :]))
    times = timed(in_turn, device, steps)
    for row in rows:
        row |= row_of(times[str(row["fused"])])
        row["to_serial"] = median(times["serial"]) / row["step_ms"]
    return rows


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's blocks: of its parts with parameters, down to where there are three or more."""
    parts = [(name, part) for name, part in model.named_children() if any(True for _ in part.parameters())]
    if len(parts) >= 3 or not parts:
        return tuple(name for name, _ in parts)
    found: list[str] = []
    for name, part in parts:
        inner = [f"{name}.{inside}" for inside in blocks_of(part)]
        found += inner if len(inner) > 1 else [name]
    return tuple(found)
