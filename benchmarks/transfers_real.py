"""Orders of transfers, measured: one worker and one server, real computing, a link of a given rate between them.

One job a model and rate: a step of AlexNet takes seconds at 200 Mbit/s, and so does each thing that a job does once
(its state goes to the server, the step is captured, profiled). In it the orders take turns, round by round, so that
what else the machine does falls on all of them alike; `benchmarks.transfers_rank` is what the two ranks run. A step's
time is the median over all steps of all turns; E is TicTac's efficiency, (U - m) / (U - L), of the time that was
predicted and of the one that was measured.

With agents, a job of one worker and one server publishes one version, both at one end of the link, and forwards at the
other end pull all parameters in every call.

Batches are such that a worker computes about as long as it receives (the ratio is in the result), and images small:
of VGG-16 and AlexNet they decide how large the first linear layer is, and the result says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.bench import Budget, Save, table_of, unsaved
from benchmarks.namespaces import linked, needs_namespaces
from benchmarks.ranks import results
from benchmarks.transfers_rank import ALL_FIRST, Asked, run_rank, run_with_agents
from benchmarks.turns import one_thread
from hocket.cli.console import UsageError
from hocket.job import Job
from hocket.zoo import load

ORDERS: tuple[str, ...] = ("auto", "tac", "layer", "random", "reverse", ALL_FIRST)
TARGETS, MBITS = ("alexnet", "vgg16", "inception-v3"), (200,)
IMAGE_SIZES = {"alexnet": 67, "inception-v3": 75, "vgg16": 32}
MAX_BATCH = 1024
# The share of turns in the time for a model at a rate; the remainder is for the start, state and profile.
TURNS_PART = 0.5


def run(
    targets: Sequence[str] = TARGETS,
    *,
    mbits: Sequence[int] = MBITS,
    orders: Sequence[str] = (),
    rounds: int = 2,
    steps: int = 10,
    seconds: float | None = None,
    agents: bool = False,
    batch_size: int | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Every order of every model at every rate: of steps, or of calls of agents.

    Raises:
        InputError: there can be no network namespaces here, or a process failed. Says why.
    """
    known = tuple(order for order in ORDERS if not agents or order != ALL_FIRST)
    orders = orders or known
    if unknown := set(orders) - set(known):
        raise UsageError(f"--order: expected one of {', '.join(known)}, got {unknown.pop()!r}")
    if "layer" not in orders:
        raise UsageError("--order: layer has to be among them, which all others are compared with")
    needs_namespaces("transfers over real links")
    budget = Budget(seconds)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"rows": rows, "left_out": budget.left_out}
    items = [(model, mbit) for mbit in sorted(mbits, reverse=True) for model in targets]
    for number, (model, mbit) in enumerate(items):
        with budget.item(f"{model} at {mbit} Mbit/s") as begun:
            if not begun:
                continue
            part_s = None if seconds is None else TURNS_PART * budget.left_s() / (len(items) - number)
            sizes = {"image_size": IMAGE_SIZES[model]} if model in IMAGE_SIZES else {}
            sizes["batch_size"] = batch_size or fitting_batch(model, sizes, mbit * 1e6 / 8, forward_only=agents)
            with linked(mbit) as ends:
                asked = Asked(model, sizes, orders, rounds, steps, part_s)
                places = [(rank, ends, asked) for rank in range(2 + agents)]
                work = run_with_agents if agents else run_rank
                turns = results(work, places, "benchmarks.transfers_rank", num_answers=1)[0]
        found = {order: _summary([turn for turn in turns if turn["order"] == order]) for order in orders}
        rows.append({"model": model, "mbit_per_s": mbit, "sizes": sizes, "orders": found})
        save(result)
    return result


def fitting_batch(model: str, sizes: Mapping[str, Any], bytes_per_s: float, *, forward_only: bool = False) -> int:
    """The batch for which one core computes as long as the parameters are on the link.

    Batches are doubled until they take that long: where parameters are large, what an example adds to a batch of two
    says little of one of hundreds.
    """
    batch, took_s, shorter_s, wanted_s = 1, 0.0, 0.0, float("inf")
    while took_s < wanted_s and batch < MAX_BATCH:
        batch, shorter_s = 2 * batch, took_s
        job = load(model, batch_size=batch, **sizes)
        with one_thread():  # as a rank has
            took_s = min(_computing_s(job, forward_only) for _ in range(2))
        wanted_s = sum(tensor.nbytes for tensor in job.models[0].parameters()) / bytes_per_s
    part = min(1.0, (wanted_s - shorter_s) / max(1e-6, took_s - shorter_s))
    return max(1, round(batch / 2 * (1 + part)))


def _computing_s(job: Job, forward_only: bool) -> float:
    """A forward, or a step without its update, which is the server's."""
    batch, start_s = job.batch(0), time.perf_counter()
    if forward_only:
        with torch.no_grad():
            job.models[0](batch[0])
        return time.perf_counter() - start_s
    job.step(batch)
    updating_s = time.perf_counter()
    job.optimizers[0].step()
    return updating_s - start_s - (time.perf_counter() - updating_s)


def _summary(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the times of all turns of an order: medians, and TicTac's efficiency of both of them."""
    times_us = sorted(us for turn in turns for us in turn["times_us"])
    step_us, predicted_us = median(times_us), median(turn["predicted_us"] for turn in turns)
    lower_us, upper_us = (median(turn[bound] for turn in turns) for bound in ("lower_us", "upper_us"))
    room_us = upper_us - lower_us
    return {
        "step_us": step_us,
        "predicted_us": predicted_us,
        "efficiency_predicted": (upper_us - predicted_us) / room_us if room_us else 1.0,
        "efficiency_measured": (upper_us - step_us) / room_us if room_us else 1.0,
        "potential": room_us / lower_us,
        "steps_in_order": sum(turn["in_order"] for turn in turns),
        "steps": sum(turn["steps"] for turn in turns),
        "deciles_us": quantiles(times_us, n=10) if len(times_us) > 1 else [],
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [
        {**row, **found, "order": order, "to_layer": found["step_us"] / row["orders"]["layer"]["step_us"]}
        for row in result["rows"]
        for order, found in row["orders"].items()
    ]
    columns = {
        **{"model": "{model}", "Mbit/s": "{mbit_per_s}", "order": "{order}", "us": "{step_us:.0f}"},
        **{"of layer's": "{to_layer:.3f}", "predicted": "{predicted_us:.0f}", "S": "{potential:.2f}"},
        **{"E predicted": "{efficiency_predicted:.2f}", "E": "{efficiency_measured:.2f}"},
        "in order": "{steps_in_order} of {steps}",
    }
    yield table_of("one worker, one server, a link between them", columns, rows)
