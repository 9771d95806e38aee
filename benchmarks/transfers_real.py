"""Orders of transfers, measured: one worker and one server, real computing, a link of a given rate between them.

One job a model and rate: a step of AlexNet takes seconds at 200 Mbit/s, and so does each thing that a job does once
(its state goes to the server, the step is captured, profiled). In it the orders take turns, round by round, so that
what else the machine does falls on all of them alike; `benchmarks.transfers_rank` is what the two ranks run. A step's
time is the median over all steps of all turns; E is TicTac's efficiency, (U - m) / (U - L), of the time that was
predicted and of the one that was measured.

With agents, a job of one worker and one server publishes one version, both at one end of the link, and forwards at the
other end pull all parameters in every call (`benchmarks.transfers_agents`).

Batches are such that a worker computes about as long as it receives (the ratio is in the result), and images small:
of VGG-16 and AlexNet they decide how large the first linear layer is, and the result says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.bench import Budget, Save, ratios, unsaved
from benchmarks.namespaces import Namespace, linked, unavailable_reason
from benchmarks.transfers_rank import ALL_FIRST, WARM_UP_STEPS
from hocket.cli.console import UsageError, table
from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo import load

ORDERS: tuple[str, ...] = ("auto", "tac", "layer", "random", "reverse", ALL_FIRST)
TARGETS, MBITS = ("alexnet", "vgg16", "inception-v3"), (200,)
IMAGE_SIZES = {"alexnet": 67, "inception-v3": 75, "vgg16": 32}
MAX_BATCH = 1024
PORT, AGENTS_PORT = "29571", "29575"
TIMEOUT_S = 900
# Of the time for a model at a rate, what its turns get; the rest is for starting, state and profile.
TURNS_PART = 0.5


def run(
    targets: Sequence[str] = TARGETS,
    *,
    mbits: Sequence[int] = MBITS,
    orders: Sequence[str] = (),
    rounds: int = 2,
    steps: int = 10,
    batch_size: int | None = None,
    seconds: float | None = None,
    agents: bool = False,
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
    if (reason := unavailable_reason()) is not None:
        raise InputError(f"transfers over real links are SKIPPED: {reason}")
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
            if agents:
                found = _calls_by_order(_agent(model, sizes, mbit, [*orders] * rounds, steps))
            else:
                settings = {"orders": orders, "rounds": rounds, "steps": steps, "seconds": part_s}
                found = _by_order(_job(model, sizes, mbit, settings))
        rows.append({"model": model, "mbit_per_s": mbit, "sizes": sizes, "orders": found})
        save(result)
    return result


def fitting_batch(model: str, sizes: Mapping[str, Any], bytes_per_s: float, *, forward_only: bool = False) -> int:
    """The batch for which one core computes as long as the parameters are on the link.

    Batches are doubled until they take that long: where parameters are large, what an example adds to a batch of two
    says little of one of hundreds.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has
    try:
        batch, took_s, shorter_s, wanted_s = 1, 0.0, 0.0, float("inf")
        while took_s < wanted_s and batch < MAX_BATCH:
            batch, shorter_s = 2 * batch, took_s
            job = load(model, batch_size=batch, **sizes)
            net, example = job.models[0], job.batch(0)
            took_s = min(_forward_s(net, example[0]) if forward_only else _gradients_s(job, example) for _ in range(2))
            wanted_s = sum(tensor.numel() * tensor.element_size() for tensor in net.parameters()) / bytes_per_s
    finally:
        torch.set_num_threads(num_threads)
    part = min(1.0, (wanted_s - shorter_s) / max(1e-6, took_s - shorter_s))
    return max(1, round(batch / 2 * (1 + part)))


def _forward_s(model: torch.nn.Module, inputs: Any) -> float:
    start_s = time.perf_counter()
    with torch.no_grad():
        model(inputs)
    return time.perf_counter() - start_s


def _gradients_s(job: Job, batch: Any) -> float:
    """A step without its update, which is the server's."""
    start_s = time.perf_counter()
    job.step(batch)
    updating_s = time.perf_counter()
    job.optimizers[0].step()
    return updating_s - start_s - (time.perf_counter() - updating_s)


def _job(model: str, sizes: Mapping[str, int], mbit: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run both ranks, and return what rank 0 reports of each turn."""
    told = json.dumps({"model": model, "sizes": sizes, "timeout_s": 300.0, **settings})
    processes = []
    with linked(mbit) as (worker, server):
        for rank, end in enumerate((worker, server)):
            processes.append(process_at(end, rank, (worker.address, PORT), "transfers_rank", told))
        try:
            ends = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, said) in zip(processes, ends, strict=True):
        if process.returncode:
            raise InputError(
                f"{model} at {mbit} Mbit/s: {said.strip().splitlines()[-1] if said.strip() else 'no word'}"
            )
    return [json.loads(line) for line in ends[0][0].splitlines()]


def _agent(model: str, sizes: Mapping[str, int], mbit: int, orders: Sequence[str], calls: int) -> list[dict[str, Any]]:
    """Run the agent, and return what it reports of each turn."""
    with linked(mbit) as (agent, job):
        settings = {"model": model, "sizes": sizes, "address": f"{job.address}:{AGENTS_PORT}"}
        store, module = (job.address, AGENTS_PORT), "transfers_agents"
        ranks = [
            process_at(job, rank, store, module, json.dumps({**settings, "rank": rank}), is_heard=False)
            for rank in (0, 1)
        ]
        wanted = {**settings, "orders": orders, "calls": calls, "rank": None}
        caller = process_at(agent, 0, store, module, json.dumps(wanted))
        try:
            out, said = caller.communicate(timeout=TIMEOUT_S)
        finally:
            for process in (*ranks, caller):
                process.kill()
                process.wait()
    if caller.returncode:
        raise InputError(f"agents of {model}: {said.strip().splitlines()[-1] if said.strip() else 'no word'}")
    return [json.loads(line) for line in out.splitlines()]


def process_at(
    end: Namespace, rank: int, store: tuple[str, str], module: str, settings: str, *, is_heard: bool = True
) -> subprocess.Popen[str]:
    """Start a module of this package at an end of the link, as a rank of two of a job. Output is piped, if heard."""
    address, port = store
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
    variables |= {"GLOO_SOCKET_IFNAME": end.interface, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
    words = end.command(sys.executable, "-m", f"benchmarks.{module}", settings)
    pipe = subprocess.PIPE if is_heard else subprocess.DEVNULL
    return subprocess.Popen(words, env=os.environ | variables, stdout=pipe, stderr=pipe, text=True)


def _by_order(turns: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for order in dict.fromkeys(turn["order"] for turn in turns):
        mine = [turn for turn in turns if turn["order"] == order]
        times = sorted(us for turn in mine for us in turn["steps_us"])
        found[order] = {
            **_summary(times, mine),
            "deciles_us": quantiles(times, n=10) if len(times) > 1 else [],
            "steps": len(times) + WARM_UP_STEPS * len(mine),
        }
    return found


def _calls_by_order(turns: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    by_order = {turn["order"]: [each for each in turns if each["order"] == turn["order"]] for turn in turns}
    return {order: _summary([us for turn in own for us in turn["calls_us"]], own) for order, own in by_order.items()}


def _summary(times_us: Sequence[float], turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the times of all turns of an order: medians, and TicTac's efficiency of both of them."""
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
        "steps": len(times_us),
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [
        (
            *(row["model"], str(row["mbit_per_s"]), order, f"{found['step_us'] / 1e3:.1f}"),
            f"{found['step_us'] / row['orders']['layer']['step_us']:.3f}",
            f"{found['predicted_us'] / 1e3:.1f}",
            *ratios(found, ("potential", "efficiency_predicted", "efficiency_measured")),
            f"{found['steps_in_order']} of {found['steps']}",
        )
        for row in result["rows"]
        for order, found in row["orders"].items()
    ]
    columns = ("model", "Mbit/s", "order", "ms", "of layer's", "predicted", "S", "E predicted", "E", "in order")
    yield table("one worker, one server, a link between them", columns, rows)
