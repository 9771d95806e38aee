"""Whole searches, by every executor: the same trials with the same seeds, captures and searches for plans included.

    serial      one trial after another, by a plain loop
    processes   as many processes as there are cores, one trial in each
    fused       trials of one shape as one model, in slots
    auto        the same
    scheduled   the same, and its step by a plan of `hocket.schedule`

Random search gives all trials all epochs; Hyperband runs its brackets side by side. What counts is the time of a whole
search over that of serial, in one run. Values of the trials are compared, too: trials that train together have those
that they have alone, within the rounding of single precision.

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, section 5.4, Tables 11 and 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.bench import Save, unsaved
from benchmarks.budget import Budget
from benchmarks.tune.searches import SEARCHES, Workload
from hocket.cli.console import table
from hocket.errors import InputError, MissingDependencyError
from hocket.search.halving import Hyperband
from hocket.search.progress import device_time_s
from hocket.search.search import Record
from hocket.search.tune import SearchConfig, search

CONTENDERS = ("serial", "processes", "fused", "auto", "scheduled")
ALGORITHMS = ("random", "hyperband")
HYPERBAND_EPOCHS = 81


def run(
    targets: Sequence[str] = (),
    *,
    contenders: Sequence[str] = CONTENDERS,
    algorithms: Sequence[str] = (),
    trials: int | None = None,
    quick: bool = False,
    budget_s: float | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Run every search by every contender, serial in any case.

    Raises:
        InputError: an unknown name.
        MissingDependencyError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingDependencyError("optuna", "tune", "bench tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for given, known in ((targets, tuple(SEARCHES)), (contenders, CONTENDERS), (algorithms, ALGORITHMS)):
        for name in given:
            if name not in known:
                raise InputError(f"bench tune: expected some of {', '.join(known)}, got {name!r}")
    budget = Budget(budget_s)
    result: dict[str, Any] = {
        "optuna": optuna.__version__,
        "quick": quick,
        "searches": {},
        "left_out": budget.left_out,
    }
    for target in targets or tuple(SEARCHES):
        for algorithm in algorithms or SEARCHES[target].algorithms:
            rows: dict[str, Any] = {}
            result["searches"][f"{target} {algorithm}"] = rows
            for contender in [name for name in CONTENDERS if name == "serial" or name in contenders]:
                with budget.item(f"{target} {algorithm} {contender}", kind=f"{algorithm} {contender}") as begun:
                    if begun:
                        rows[contender] = _searched(SEARCHES[target], algorithm, contender, trials, quick)
                        _compare(rows, contender)
                save(result)
    return result


def _searched(workload: Workload, algorithm: str, contender: str, trials: int | None, quick: bool) -> dict[str, Any]:
    """One whole search: its time, and the value of each trial."""
    import optuna

    if algorithm == "hyperband":
        options: dict[str, Any] = {"halving": Hyperband(eta=3), "epochs": 9 if quick else HYPERBAND_EPOCHS}
    else:
        options = {"trials": 4 if quick else trials or workload.trials, "epochs": 2 if quick else workload.epochs}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    config = SearchConfig(study=study, executor=contender, runner=_runner(contender), **options)
    workload(dict(_first_params(workload)))  # its data are loaded once, before anybody is timed
    start = perf_counter()
    _, record = search(workload, workload.space(), config)
    took_s = perf_counter() - start
    return {"seconds": took_s, **_described(study, record)}


def _first_params(workload: Workload) -> dict[str, Any]:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return dict(study.ask(workload.space()).params)


def _runner(contender: str) -> Any:
    if contender != "scheduled":
        return None
    from hocket.session import schedule

    return lambda step, array, optimizer: schedule(step, array, optimizer, cache=False)


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
    """How far each trial's value is from the serial one, of values above 1 relative to it.

    Trials whose rate makes training chaotic carry rounding far, by any two executors; see the tests for float64.
    """
    pairs = zip(serial["values"], own["values"], strict=True)
    return [abs(a - b) / max(1.0, abs(a)) for a, b in pairs if a is not None and b is not None]


def _compare(rows: dict[str, Any], contender: str) -> None:
    """How many times faster than serial, and how far the values are from its."""
    serial, own = rows["serial"], rows[contender]
    own["to_serial"] = serial["seconds"] / own["seconds"]
    own["farthest"] = max(apart(serial, own), default=0.0)
    own["ends_differ"] = sum(a != b for a, b in zip(serial["states"], own["states"], strict=True))


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [
        (
            *(name, contender, f"{row['seconds']:.1f}", f"{row['to_serial']:.2f}"),
            *(f"{median(apart(found['serial'], row) or [0.0]):.0e}", f"{row['farthest']:.0e}"),
        )
        for name, found in result["searches"].items()
        for contender, row in found.items()
    ]
    columns = ("search", "executor", "seconds", "speedup", "apart (median)", "farthest")
    title = f"whole searches, {result['threads']} threads, torch {result['torch']}: speedup over serial"
    yield table(title, columns, rows, words=2)
