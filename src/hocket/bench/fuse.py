"""Training B models at once: throughput against B of everything that can do it, side by side in one run.

    serial       a loop over B models, each with its optimizer
    processes    B processes side by side, each with its model (HFTA calls it concurrent)
    vmap         `hocket.fuse` with ``backend="vmap"``
    fused        with rules everywhere
    auto         with whatever was timed to be the fastest

Throughput is models times steps per second; what counts is the ratio to serial, of steps taken in turns. Where fusing
stops paying is the first B at which a ratio falls below one. All models share the batch, as in a search over seeds or
rates. Memory is what the process grew by (CPU) or the allocator's peak (CUDA), each contender in a process of its own.

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, sections 4 and 5.
"""

from __future__ import annotations

import multiprocessing
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hocket import zoo
from hocket.errors import InputError
from hocket.fuse import fuse

__all__ = ["CONTENDERS", "TARGETS", "Target", "run"]

CONTENDERS = ("serial", "processes", "vmap", "fused", "auto")
BACKENDS = {"vmap": "vmap", "fused": "rule", "auto": "auto"}
MAX_PROCESSES = 8
WARM_UP = 2


@dataclass(frozen=True)
class Target:
    """A classifier of the zoo, and how large: batches are pairs of inputs and labels."""

    entry: str
    batch_size: int | None = None
    options: tuple[tuple[str, int], ...] = ()

    def model_and_batch(self, seed: int, device: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """The model of a seed, and a batch that is the same for every seed."""
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_batches": 1, "device": device}
        options |= dict(self.options)
        model = zoo.load(self.entry, seed=seed, **options).model
        batch = zoo.load(self.entry, seed=0, **options).batch(0)
        if not isinstance(model, nn.Module) or not (isinstance(batch, tuple) and len(batch) == 2):
            raise InputError(f"bench fuse: {self.entry}: expected a classifier, whose batches are inputs and labels")
        return model, batch


TARGETS = {
    "mlp-32": Target("mlp", options=(("width", 32),)),
    "mlp-128": Target("mlp", options=(("width", 128),)),
    "digits-cnn": Target("digits-cnn"),
    "pointnet-cls": Target("pointnet-cls", 8, (("points", 256),)),
    "pointnet-seg": Target("pointnet-seg", 8, (("points", 256),)),
    "resnet20": Target("resnet20", 16),
    "mobilenet-v2": Target("mobilenet-v2", 4, (("image_size", 64),)),
}


def run(
    targets: Sequence[str] = (),
    *,
    device: str = "cpu",
    sizes: Sequence[int] = (1, 2, 4, 8),
    steps: int = 7,
    amp: bool = False,
    memory: bool = True,
    contenders: Sequence[str] = CONTENDERS,
) -> dict[str, Any]:
    """Measure targets at every B.

    Args:
        targets: names in `TARGETS`, or of zoo entries that classify; all of `TARGETS` if none are given.
        device: "cpu" or "cuda".
        sizes: the numbers of models, B.
        steps: counted steps of each contender; medians are taken.
        amp: train under autocast to bfloat16.
        memory: measure memory too (each contender in a new process).
        contenders: which of `CONTENDERS`.

    Returns:
        ``targets``: name -> B (as text) -> contender -> ``models_per_s``, ``step_ms``, ``to_serial``,
        ``memory_bytes``.

    Raises:
        InputError: the device is not there, or a target or contender is unknown.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("bench fuse: device: expected one that is there, got 'cuda', and torch sees no GPU")
    unknown = set(contenders) - set(CONTENDERS)
    if unknown:
        raise InputError(f"bench fuse: expected contenders among {', '.join(CONTENDERS)}, got {sorted(unknown)}")
    chosen = {name: TARGETS.get(name) or Target(name) for name in (targets or TARGETS)}
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "amp": amp,
        "targets": {
            name: {str(size): _measure(target, size, device, steps, amp, memory, tuple(contenders)) for size in sizes}
            for name, target in chosen.items()
        },
    }


def _measure(
    target: Target, size: int, device: str, steps: int, amp: bool, memory: bool, contenders: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    in_process = {name: _step(name, target, size, device, amp) for name in contenders if name != "processes"}
    times: dict[str, list[float]] = {name: [] for name in in_process}
    for number in range(-WARM_UP, steps):
        for name, step in in_process.items():
            start = perf_counter()
            step()
            _settle(device)
            if number >= 0:
                times[name].append(perf_counter() - start)
    found = {name: {"step_ms": median(each) * 1e3} for name, each in times.items()}
    if "processes" in contenders and size <= MAX_PROCESSES:
        found["processes"] = {"step_ms": _side_by_side(target, size, device, steps, amp) * 1e3}
    serial_ms = found["serial"]["step_ms"] if "serial" in found else float("nan")
    for name, row in found.items():
        row["models_per_s"] = size / row["step_ms"] * 1e3
        row["to_serial"] = serial_ms / row["step_ms"]
        if memory and name != "processes":
            row["memory_bytes"] = _in_process(_grown, name, target, size, device, amp)
    return found


def _step(name: str, target: Target, size: int, device: str, amp: bool) -> Callable[[], None]:
    """One training step of all models, by one contender."""
    models = [target.model_and_batch(seed, device)[0] for seed in range(size)]
    inputs, labels = target.model_and_batch(0, device)[1]
    if name == "serial":
        return _serial(models, inputs, labels, amp)
    array = fuse(models, backend=BACKENDS[name], shared=True)
    optimizer = _optimizer(array)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=amp):
            loss = array.loss(functional.cross_entropy, array(inputs), labels)
        loss.backward()
        optimizer.step()

    return step


def _serial(models: list[nn.Module], inputs: Tensor, labels: Tensor, amp: bool) -> Callable[[], None]:
    optimizers = [_optimizer(model) for model in models]

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=amp):
                loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """With the same rates in all models, torch's own does for stacked parameters what it does for each."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _side_by_side(target: Target, size: int, device: str, steps: int, amp: bool) -> float:
    """Seconds that a step of `size` processes takes, each training a model, from a common start to the last end."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(size + 1)
    end = context.Barrier(size + 1)
    workers = [
        context.Process(target=_one_of_many, args=(target, seed, device, steps, amp, start, end), daemon=True)
        for seed in range(size)
    ]
    with _stopped(workers):
        for worker in workers:
            worker.start()
        start.wait(timeout=300)
        before = perf_counter()
        end.wait(timeout=600)
        return (perf_counter() - before) / steps


def _one_of_many(target: Target, seed: int, device: str, steps: int, amp: bool, start: Any, end: Any) -> None:
    model, (inputs, labels) = target.model_and_batch(seed, device)
    step = _serial([model], inputs, labels, amp)
    for _ in range(WARM_UP):
        step()
    _settle(device)
    start.wait(timeout=300)
    for _ in range(steps):
        step()
    _settle(device)
    end.wait(timeout=600)


@contextmanager
def _stopped(workers: list[Any]) -> Iterator[None]:
    """No worker outlives the measurement."""
    try:
        yield
    finally:
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()


def _in_process(function: Callable[..., None], *args: Any) -> float:
    """What a function puts into a queue, from a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=function, args=(queue, *args), daemon=True)
    with _stopped([worker]):
        worker.start()
        return float(queue.get(timeout=600))


def _grown(queue: Any, name: str, target: Target, size: int, device: str, amp: bool) -> None:
    """Peak memory of two steps, bytes: above what the process held before the models were made."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = _step(name, target, size, device, amp)
    for _ in range(2):
        step()
    _settle(device)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    queue.put(torch.cuda.max_memory_allocated() if device == "cuda" else grown)
