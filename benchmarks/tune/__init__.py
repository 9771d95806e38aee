"""Whole searches, by every executor: the same trials with the same seeds, captures and searches for plans included.

What counts is the time of a whole search over that of one trial after another (``serial``), in one run. Values of the
trials are compared, too. Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, section 5.4.

What is searched are entries of the zoo, with the hyper-parameters of HFHT (Table 12): rate, both betas and weight decay
of Adam, factor and period of the schedule, batch size, and an option of the model: PointNet's width, in place of
transforms. Sizes are scaled down so that a search takes less than four minutes on two cores.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bench import Save, check_names, table_of, unsaved
from hocket import zoo
from hocket.search.policy import Hyperband
from hocket.search.search import Record, device_time_s
from hocket.search.training import Training
from hocket.search.tune import SearchConfig, search
from hocket.session import schedule


@dataclass(frozen=True)
class Workload:
    """A search: what is trained, and over which parameters.

    `num_batches` is of an epoch: another half as many are for validation. The batch size, the entry's options and the
    entry itself are chosen from what `batch_sizes`, `choices` and `entries` have, if it is more than one.
    """

    entry: str
    size: tuple[tuple[str, int], ...] = ()
    num_batches: int = 16
    trials: int = 60
    epochs: int = 25
    batch_sizes: tuple[int, ...] = (32,)
    choices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    entries: tuple[str, ...] = field(default=())
    algorithms: tuple[str, ...] = ("random",)

    def space(self) -> dict[str, Any]:
        """Optuna's distributions: the fusible ones of Table 12, and the infusible ones that this search has."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        found: dict[str, Any] = {
            "lr": FloatDistribution(1e-4, 1e-2, log=True),
            "beta1": FloatDistribution(0.001, 0.999),
            "beta2": FloatDistribution(0.001, 0.999),
            "weight_decay": FloatDistribution(0.0, 0.5),
            "gamma": FloatDistribution(0.1, 0.9),
            "period": CategoricalDistribution([5, 10, 20, 40]),
        }
        more: dict[str, tuple[Any, ...]] = {"batch_size": self.batch_sizes, "entry": self.entries, **dict(self.choices)}
        return found | {name: CategoricalDistribution(values) for name, values in more.items() if len(values) > 1}

    def __call__(self, params: Mapping[str, Any]) -> Training:
        """One trial."""
        size = dict(self.size) | {name: params[name] for name, _ in self.choices}
        entry = params.get("entry", self.entry)
        batch_size = params.get("batch_size", self.batch_sizes[0])
        first, batches = _loaded(entry, batch_size, self.num_batches * 3 // 2, tuple(size.items()))
        model = copy.deepcopy(first)
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=params["lr"],
            betas=(params["beta1"], params["beta2"]),
            weight_decay=params["weight_decay"],
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params["period"], params["gamma"])
        return Training(
            model,
            optimizer,
            functional.cross_entropy,
            batches[: self.num_batches],
            functional.cross_entropy,
            scheduler,
            batches[self.num_batches :],
        )


@functools.cache
def _loaded(
    entry: str, batch_size: int, num_batches: int, size: tuple[tuple[str, int], ...]
) -> tuple[nn.Module, list[Any]]:
    """A model to copy, and batches that all trials share."""
    options: dict[str, Any] = dict(size)
    job = zoo.load(entry, seed=0, batch_size=batch_size, num_batches=num_batches, **options)
    return job.models[0], list(job.batches)


SEARCHES = {
    "mlp-32": Workload("mlp", (("width", 32),), algorithms=("random", "hyperband")),
    "mlp-128": Workload("mlp", (("width", 128),)),
    "digits-cnn": Workload("digits-cnn", epochs=20),
    "pointnet": Workload(
        "pointnet-cls", (("points", 64),), num_batches=4, batch_sizes=(8, 16), choices=(("width", (8, 16)),)
    ),
    "mobilenet": Workload(
        "mobilenet-v2",
        (("image_size", 32),),
        num_batches=4,
        trials=8,
        epochs=15,
        batch_sizes=(8,),
        entries=("mobilenet-v2", "mobilenet-v3-large"),
    ),
}


CONTENDERS = ("serial", "processes", "fused", "auto", "scheduled")
HYPERBAND_EPOCHS = 81


def run(
    targets: Sequence[str] = tuple(SEARCHES),
    *,
    contenders: Sequence[str] = CONTENDERS,
    quick: bool = False,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Run every search by every contender, serial in any case."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    check_names("tune", targets, SEARCHES)
    check_names("tune", contenders, CONTENDERS)
    result: dict[str, Any] = {"optuna": optuna.__version__, "quick": quick, "searches": {}}
    for target in targets:
        for algorithm in SEARCHES[target].algorithms:
            rows: dict[str, Any] = {}
            result["searches"][f"{target} {algorithm}"] = rows
            for contender in dict.fromkeys(("serial", *contenders)):
                rows[contender] = _searched(SEARCHES[target], algorithm, contender, quick)
                _compare(rows["serial"], rows[contender])
                save(result)
    return result


def _searched(workload: Workload, algorithm: str, contender: str, quick: bool) -> dict[str, Any]:
    """One whole search: its time, and the value of each trial."""
    import optuna

    if algorithm == "hyperband":
        options: dict[str, Any] = {"halving": Hyperband(eta=3), "epochs": 9 if quick else HYPERBAND_EPOCHS}
    else:
        options = {"trials": 4 if quick else workload.trials, "epochs": 2 if quick else workload.epochs}
    if contender == "scheduled":
        options["runner"] = functools.partial(schedule, cache=False)
    study, other = (optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)) for _ in range(2))
    workload(other.ask(workload.space()).params)  # its data are loaded once, before anybody is timed
    start = perf_counter()
    _, record = search(workload, workload.space(), SearchConfig(study=study, executor=contender, **options))
    return {"seconds": perf_counter() - start, **_described(study, record)}


def _described(study: Any, record: Record) -> dict[str, Any]:
    trained_s, apart_s = device_time_s(record)
    return {
        "trained_s": trained_s,
        "side_by_side": apart_s / trained_s,
        "epochs": len(record.epochs),
        "fused_models": record.searches,
        "one_at_a_time": [why for _, why in record.groups if why],
        "best_value": study.best_value,
        "values": [trial.value for trial in study.trials],
        "states": [trial.state.name for trial in study.trials],
    }


def apart(serial: dict[str, Any], own: dict[str, Any]) -> list[float]:
    """Distance of each trial's value from the serial one, of values above 1 relative to it.

    Trials whose rate makes training chaotic carry rounding far, by any two executors; see the tests for float64.
    """
    pairs = zip(serial["values"], own["values"], strict=True)
    return [abs(a - b) / max(1.0, abs(a)) for a, b in pairs if a is not None and b is not None] or [0.0]


def _compare(serial: dict[str, Any], own: dict[str, Any]) -> None:
    """Speed over serial, and distance of the values from its."""
    own["to_serial"] = serial["seconds"] / own["seconds"]
    own |= {"apart": median(apart(serial, own)), "farthest": max(apart(serial, own))}
    own["ends_differ"] = sum(a != b for a, b in zip(serial["states"], own["states"], strict=True))


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [
        {"search": name, "executor": contender, **row}
        for name, found in result["searches"].items()
        for contender, row in found.items()
    ]
    columns = {
        **{"search": "{search}", "executor": "{executor}", "seconds": "{seconds:.1f}", "speedup": "{to_serial:.2f}"},
        **{"apart (median)": "{apart:.0e}", "farthest": "{farthest:.0e}"},
    }
    title = f"whole searches, {result['threads']} threads, torch {result['torch']}: speedup over serial"
    yield table_of(title, columns, rows, words=2)
