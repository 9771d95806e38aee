"""From a file to the first output: ``python -m benchmarks loading``.

**Over a link.** A reader hands out bytes at a rate, as a network card does, and the batch is such that the forward
takes as long as reading. Contenders alternate, each on a model whose weights are set to zero before:

    load_then_run   all is read straight into the parameters (hocket.load, hocket.loading.finish), then the forward
    safetensors     all is read, safetensors.torch.load, load_state_dict, then the forward: copies more than the above
    file_order      hocket.load of a stream that cannot seek: the order in which safetensors writes, by dtype and name
    registration    hocket.load as it is, in the order of registration
    first_use       in the order that hocket.loading.first_use finds
    reordered       a stream that cannot seek, of a file that hocket.loading.reorder has written

**From a warm disk.** ``load_file`` and ``load_state_dict`` against `hocket.load`, until all weights are there, and
until the first output of a small batch.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import safetensors
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_model

from benchmarks.bench import Save, columns_of, table_of, unsaved
from benchmarks.turns import in_turns
from hocket import zoo
from hocket.cli.console import UsageError
from hocket.loading import finish, first_use, load, reorder
from hocket.loading.targets import named_tensors

Forward = Callable[[], torch.Tensor]
GBIT = 1.0
TOKENS = 128
BERT: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert-medium", {"width": 768, "depth": 12}),
    "bert-tiny": ("bert-tiny", {"width": 128, "depth": 2}),
}
NAMES = ("resnet50", "bert-base", "bert-tiny")
CONTENDERS = ("load_then_run", "safetensors", "file_order", "registration", "first_use", "reordered")


class PacedReader:
    """Bytes at a rate: what is asked for is there as soon as a link of that rate has carried it."""

    name = "link"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        self.size = len(data)
        self._data = memoryview(data)
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def read_at(self, offset: int, length: int) -> memoryview:
        """At most `length` bytes from `offset` on."""
        found = self._data[offset : offset + length]
        self._free_s = max(self._free_s, time.perf_counter()) + len(found) / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return found


class PacedStream(io.RawIOBase):
    """The same, of what cannot seek."""

    name = "stream"

    def __init__(self, data: bytes, bytes_per_s: float) -> None:
        super().__init__()
        self._reader = PacedReader(data, bytes_per_s)
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        found = self._reader.read_at(self._at, len(target))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


def _network(name: str, batch_size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model in the mode in which it is used, and the input of its forward."""
    if name in BERT:
        entry, size = BERT[name]
        job = zoo.load(entry, batch_size=batch_size, num_batches=1, steps=TOKENS, **size)
        return job.models[0].eval(), job.batch(0)["input_ids"]
    job = zoo.load(name, batch_size=batch_size, num_batches=1)
    return job.models[0].eval(), job.batch(0)[0]


def run(
    targets: Sequence[str] = NAMES, rounds: int = 5, batch_size: int | None = None, save: Save = unsaved
) -> dict[str, Any]:
    """Measure each model over a link, and from a warm disk. Batches are such that forwards take as long as reading."""
    for name in targets:
        if name not in NAMES:
            raise UsageError(f"{name}: expected one of {', '.join(NAMES)}")
    bytes_per_s = GBIT * 1e9 / 8
    models: dict[str, Any] = {}
    result = {"safetensors": safetensors.__version__, "bytes_per_s": bytes_per_s, "rounds": rounds, "models": models}
    for name in targets:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
            models[name] = _measured(name, Path(folder), bytes_per_s, rounds, batch_size)
        save(result)
    return result


def _measured(name: str, folder: Path, bytes_per_s: float, rounds: int, batch_size: int | None) -> dict[str, Any]:
    model, inputs = _network(name, 2)
    path, ordered = folder / "model.safetensors", folder / "ordered.safetensors"
    save_model(model, str(path))
    order = first_use(model, inputs)
    reorder(path, ordered, order)
    data, ordered_data = path.read_bytes(), ordered.read_bytes()
    read_s = len(data) / bytes_per_s
    batch = batch_size or _balanced(name, model, read_s)
    forward = _forward(model, _network(name, batch)[1])

    def then_run() -> torch.Tensor:
        finish(load(model, PacedReader(data, bytes_per_s)))
        return forward()

    def safetensors_then_run() -> torch.Tensor:
        whole = PacedReader(data, bytes_per_s).read_at(0, len(data))
        model.load_state_dict(_with_ties(model, load_bytes(bytes(whole))))
        return forward()

    def streamed(kind: Any, data: bytes, order: str | Sequence[str] = "auto") -> Forward:
        def first_output() -> torch.Tensor:
            load(model, kind(data, bytes_per_s), order=order)
            return forward()

        return first_output

    contenders: dict[str, Forward] = {
        "load_then_run": then_run,
        "safetensors": safetensors_then_run,
        "file_order": streamed(PacedStream, data),
        "registration": streamed(PacedReader, data),
        "first_use": streamed(PacedReader, data, order),
        "reordered": streamed(PacedStream, ordered_data),
    }
    over_link = _alternately(model, contenders, rounds, forward().clone())
    then_s = over_link["load_then_run"]["median_s"]
    forward_s = _seconds(forward, 3)
    return {
        "tensors": len(named_tensors(model)),
        "bytes": len(data),
        "batch_size": batch,
        "read_s": read_s,
        "forward_s": forward_s,
        # The longer of reading and the forward, over both one after another: no order can be below this.
        "bound_over_load_then_run": max(read_s, forward_s) / then_s,
        "over_link": over_link,
        "over_load_then_run": {name: found["median_s"] / then_s for name, found in over_link.items()},
        "warm_disk": _warm(model, _forward(model, inputs), path, 3 * rounds),
    }


def _warm(model: torch.nn.Module, forward: Forward, path: Path, rounds: int) -> dict[str, Any]:
    """From a file that is in memory already, until all weights are there and until the first output."""
    expected = forward().clone()

    def whole() -> None:
        model.load_state_dict(_with_ties(model, load_file(str(path))))

    def then(loaded: Callable[[], object]) -> Forward:
        def first_output() -> torch.Tensor:
            loaded()
            return forward()

        return first_output

    until: dict[str, Any] = {
        "ready": _alternately(model, {"load_file": whole, "hocket": lambda: finish(load(model, path))}, rounds),
        "output": _alternately(
            model, {"load_file": then(whole), "hocket": then(partial(load, model, path))}, rounds, expected
        ),
    }
    for found in until.values():
        found["over_load_file"] = found["hocket"]["median_s"] / found["load_file"]["median_s"]
    return until


def _alternately(
    model: torch.nn.Module,
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    expected: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Each contender in turn, from weights that are zero, and whether its outputs were the expected ones."""
    same = dict.fromkeys(contenders, True)

    def from_zero(_: int) -> None:
        finish(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.zero_()

    def compared(name: str, _: None) -> None:
        output = contenders[name]()
        same[name] &= expected is None or torch.equal(output, expected)

    steps = {name: partial(compared, name) for name in contenders}
    times_ms = in_turns(steps, from_zero, rounds=rounds + 1, block=1, warm_up=0)
    return {
        name: {"median_s": median(ms) / 1e3, "least_s": min(ms) / 1e3, "most_s": max(ms) / 1e3, "same_bits": same[name]}
        for name, (_, *ms) in times_ms.items()
    }


def _balanced(name: str, model: torch.nn.Module, read_s: float) -> int:
    """The batch size at which a forward takes about as long as reading."""
    size = 2
    for _ in range(3):
        size = max(1, round(size * read_s / _seconds(_forward(model, _network(name, size)[1]), 2)))
    return size


def _forward(model: torch.nn.Module, inputs: torch.Tensor) -> Forward:
    def forward() -> torch.Tensor:
        found = model(inputs)
        return found if isinstance(found, torch.Tensor) else found.logits

    return forward


def _with_ties(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state that has tied weights by every name, as ``load_state_dict`` wants it."""
    stored = {id(tensor): state[name] for name, tensor in named_tensors(model).items() if name in state}
    return {name: stored[id(tensor)] for name, tensor in named_tensors(model).items()}


def _seconds(work: Forward, runs: int) -> float:
    return min(in_turns({"": lambda _: work()}, rounds=1, block=runs, warm_up=1)[""]) / 1e3


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {"model": "{name}", "bytes": "{bytes:,}", "read s": "{read_s:.2f}", "forward s": "{forward_s:.2f}"}
    columns |= columns_of("over_load_then_run", CONTENDERS[1:])
    title = f"first output over load-then-run, {GBIT:g} Gbit/s, {result['threads']} threads"
    yield table_of(title, columns, result["models"])
    until = {each: f"{{warm_disk[{each}][over_load_file]:.2f}}" for each in ("ready", "output")}
    yield table_of("warm disk, over load_file and load_state_dict", {"model": "{name}", **until}, result["models"])
