"""A short search of a small MLP: what surrounds the steps counts as much as the steps.

Trials of 8 epochs of 16 batches of 32: an MLP with layer norms, of width 32 or 48, AdamW, a step schedule by trial,
accuracy. What counts is the CPU time of a whole search by `hocket.tune` over that of one trial at a time: a machine
that is busy with something else stretches the time of day of both, and unequally.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hocket
from benchmarks.bench import table_of
from benchmarks.turns import in_turns

BATCH, TRAINED, MEASURED, EPOCHS = 32, 16, 8, 8
CONTENDERS = ("serial", "auto", "fused", "scheduled")


def train(params: Mapping[str, Any]) -> hocket.Training:
    """One trial."""
    width = params["width"]
    layers = [nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"], weight_decay=params["weight_decay"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params["period"], params["gamma"])
    batches = _batches()
    loss = functional.cross_entropy
    return hocket.Training(model, optimizer, loss, batches[:TRAINED], accuracy, scheduler, validation=batches[TRAINED:])


def accuracy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float().mean()


def space() -> dict[str, Any]:
    """Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    return {
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "weight_decay": FloatDistribution(1e-5, 1e-1, log=True),
        "period": IntDistribution(1, 6),
        "gamma": FloatDistribution(0.1, 1.0),
        "width": CategoricalDistribution([32, 48]),
    }


def run(trials: int = 48, rounds: int = 5, contenders: Sequence[str] = CONTENDERS) -> dict[str, Any]:
    """Search by each contender, in turns: CPU seconds, and the best values, which tell whether they searched alike."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    best: dict[str, float] = {}

    def searched(executor: str, trials: int, _: Any = None) -> None:
        study = hocket.tune(train, space(), trials, EPOCHS, direction="maximize", executor=executor)
        best[executor] = float(study.best_value)

    searched("serial", 2)  # loads what is loaded on first use, which counts for neither
    steps = {name: functools.partial(searched, name, trials) for name in contenders}
    times_ms = in_turns(steps, rounds=rounds, block=1, warm_up=0, clock=process_time)
    serial_ms = times_ms[contenders[0]]
    return {
        "optuna": optuna.__version__,
        "trials": trials,
        "cpu_s": {name: [ms / 1e3 for ms in own] for name, own in times_ms.items()},
        "to_serial": {
            name: median(serial / mine for serial, mine in zip(serial_ms, own, strict=True))
            for name, own in times_ms.items()
        },
        "best": best,
    }


@functools.cache
def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs, and the largest of ten of them under noise."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * (TRAINED + MEASURED), 64, generator=drawn)
    target = (inputs[:, :10] + 0.5 * torch.randn(len(inputs), 10, generator=drawn)).argmax(1)
    return list(zip(inputs.split(BATCH), target.split(BATCH), strict=True))


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = {
        name: {"s": median(own), "speedup": result["to_serial"][name], "best": result["best"][name]}
        for name, own in result["cpu_s"].items()
    }
    title = f"{result['trials']} trials of 8 epochs of 16 batches, {result['threads']} threads, torch {result['torch']}"
    columns = {"executor": "{name}", "CPU seconds": "{s:.2f}", "speedup": "{speedup:.2f}", "best": "{best:.4f}"}
    yield table_of(title, columns, rows)
