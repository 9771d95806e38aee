"""All that is to be measured on a machine with a GPU, in one go and one file: ``python -m benchmarks gpu``.

Each part is a bench in a process of its own. One that crashes (an error on a GPU spoils its whole process) or hangs
costs itself alone, and what it had saved until then is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.bench import Save, unsaved
from hocket.errors import InputError

COMMAND = (sys.executable, "-m", "benchmarks")
LEAST_CORES = 3  # for the part that measures cores
ROOT = Path(__file__).parents[1]  # of the repository: `python -m benchmarks` works from there
GRACE = 0.2  # of a part's time is for loading torch, and for an item that takes longer than was guessed


@dataclass(frozen=True)
class Part:
    """A bench as words behind ``python -m benchmarks``, and its share of the time, relative to those of the others."""

    words: tuple[str, ...]
    share: float

    @property
    def name(self) -> str:
        """The name of the bench."""
        return self.words[0]


_HFTA = ("pointnet-cls-paper", "pointnet-seg-paper", "dcgan-paper")
_SECONDARY = ("resnet18-paper", "mobilenet-v3-large-paper", "transformer-2x128-paper", "bert-medium-paper")
_SIZES = ("--models", "4", "--models", "8", "--models", "16", "--models", "32", "--steps", "5")
_PRECISIONS = ("--precision", "float32", "--precision", "float16")
_RIVALS = [("--contender", name) for name in ("processes", "vmap", "fused", "auto", "scheduled")]
_CORES = Part(("manycore", "--measured", "--quick"), 1.0)
PARTS = {
    "cuda": (
        Part(("critical-path", "--device", "cuda"), 3.0),
        Part(("gpu-papers",), 0.5),
        Part(("fuse", *_HFTA, *_SECONDARY, "--device", "cuda", *_PRECISIONS, *_SIZES, *chain(*_RIVALS)), 3.0),
        _CORES,
    ),
    "cpu": (
        Part(("critical-path", "--device", "cpu", "--quick"), 3.0),
        Part(("fuse", "mlp-32", "--device", "cpu", "--models", "1", "--models", "4", "--steps", "3"), 3.0),
        _CORES,
    ),
}


def run(*, device: str = "cuda", budget_s: float = 360.0, save: Save = unsaved) -> dict[str, Any]:
    """Run every part, one after the other, within the budget.

    Returns:
        ``parts``: by name the bench's own result, with ``took_s``. ``stopped``: a line for each part that ran out of
        time (what it had saved is there); ``failed``: a line for each that ended otherwise.

    Raises:
        InputError: there is no GPU.
    """
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("bench gpu: --device: expected one that is there, got 'cuda', and torch sees no GPU")
    chosen = tuple(part for part in PARTS[device] if part is not _CORES or (os.cpu_count() or 1) >= LEAST_CORES)
    begin = perf_counter()
    result: dict[str, Any] = {"device": device, "budget_s": budget_s, "parts": {}, "stopped": {}, "failed": {}}
    for place, part in enumerate(chosen):
        left_s = max(0.0, budget_s - (perf_counter() - begin))
        own_s = left_s * part.share / sum(each.share for each in chosen[place:])
        start = perf_counter()
        found, stopped, failed = _run_part(part, own_s)
        result["parts"][part.name] = {"took_s": perf_counter() - start, **found}
        if stopped:
            result["stopped"][part.name] = stopped
        if failed:
            result["failed"][part.name] = failed
        save(result)
    return result


def _run_part(part: Part, own_s: float) -> tuple[dict[str, Any], str, str]:
    """Run a part, and return its saved result, a line if it was stopped, and a line if it failed."""
    stopped = failed = ""
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        path = Path(folder, "result.json")
        words = (*part.words, "--budget-s", str(max(1, int(own_s * (1 - GRACE)))), "--format", "json", "-o", str(path))
        with subprocess.Popen(
            (*COMMAND, *words),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # it has children of its own, which end with it
        ) as child:
            try:
                _, said = child.communicate(timeout=own_s)
                if child.returncode:
                    last = said.strip().splitlines()[-1] if said.strip() else "without a word"
                    failed = f"{part.name}: exit status {child.returncode}: {last}"
            except subprocess.TimeoutExpired:
                stopped = f"{part.name}: stopped after {own_s:.0f} s; what it had saved until then is here"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        return (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}), stopped, failed


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    yield from (f"{name}: {found['took_s']:.0f} s" for name, found in result["parts"].items())
    left_out = [line for found in result["parts"].values() for line in found.get("left_out", {}).values()]
    yield from (f"left out: {why}" for why in (*left_out, *result["stopped"].values()))
