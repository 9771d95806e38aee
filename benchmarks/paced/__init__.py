"""Many workers on few cores: computing is slept as it was recorded, transport is real. ``transfers --paced``.

Of each cluster of W workers and S servers, in one run: how well the order alone predicts the step (R^2 of TicTac's E),
how even planned steps are (the shortest over the 95th percentile), and which part of a step the first worker waits for
the last, planned and not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from statistics import correlation, mean, median, quantiles
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.bench import Save, table_of, unsaved
from benchmarks.namespaces import needs_namespaces, switched
from benchmarks.paced.ranks import Place, StepRecord, Workload, predicted_us, recorded, run_rank
from benchmarks.ranks import results
from hocket.cli.console import UsageError
from hocket.distributed.packets import chunk_bytes_for

CLUSTERS = ((2, 1), (4, 2), (8, 1), (8, 4))
WARM_UP_STEPS = 2
MIN_STEPS = 12
START_S = 6.0  # about what processes and wires of a cluster take to begin


def run(
    targets: Sequence[str] = ("googlenet",),
    *,
    clusters: Sequence[tuple[int, int]] = CLUSTERS,
    seconds: float = 240.0,
    mbit: int = 25,
    receiving_s: float = 1.0,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Each cluster of workers and servers for its part of the time. Parameters take `receiving_s` on a worker's link.

    Raises:
        InputError: there can be no network namespaces here, or a rank failed. Says why.
    """
    needs_namespaces("paced workers")
    if len(targets) > 1:
        raise UsageError(f"--paced: expected one model, got {', '.join(targets)}")
    (name,) = targets
    end_s = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "paced": "computing is slept as recorded on this machine; transport is real; gradients are not sent",
        "model": name,
        "mbit_per_s": mbit,
        "receiving_s": receiving_s,
        "rows": rows,
    }
    for number, (workers, servers) in enumerate(clusters):
        work = recorded(name, servers, mbit * 1e6 / 8, receiving_s, batch_size=2, image_size=64)
        result["scale"] = work.scale
        left_s = (end_s - time.monotonic()) / (len(clusters) - number) - START_S
        # A planned step and another one take three times what receiving does.
        steps = WARM_UP_STEPS + max(MIN_STEPS, 2 * int(left_s / (3.5 * receiving_s)))
        rows.append({"workers": workers, "servers": servers, **_cluster(work, workers, servers, mbit, steps)})
        save(result)
    return result


def _cluster(work: Workload, workers: int, servers: int, mbit: int, steps: int) -> dict[str, Any]:
    chunk_bytes = chunk_bytes_for(mbit * 1e6 / 8 / servers)
    rates = [mbit] * workers + [max(1, mbit * workers // servers)] * servers
    with switched(rates) as (address, ends):
        store = TCPStore(address, 0, None, is_master=True, timeout=timedelta(seconds=60))
        places = [
            (Place(rank, workers, servers, chunk_bytes, (address, store.port), end), work, steps)
            for rank, end in enumerate(ends)
        ]
        found = results(run_rank, places, "benchmarks.paced.ranks")
    card_bytes_per_s = (mbit * 1e6 / 8, rates[-1] * 1e6 / 8)
    records = [list(of_step) for of_step in zip(*found[:workers], strict=True)][WARM_UP_STEPS:]
    return _summary(work, records, card_bytes_per_s)


def _summary(work: Workload, steps: list[list[StepRecord]], card_bytes_per_s: tuple[float, float]) -> dict[str, Any]:
    """Summarise steps, given a record of every worker for each, and the rates of a worker's and a server's card."""
    takes_us = [(max(r.end_ns for r in step) - min(r.begin_ns for r in step)) / 1e3 for step in steps]
    ends_us = [predicted_us(work, [record.order for record in step], *card_bytes_per_s) for step in steps]
    shares = [
        (max(r.end_ns for r in step) - min(r.end_ns for r in step)) / 1e3 / us
        for step, us in zip(steps, takes_us, strict=True)
    ]
    planned = [step[0].is_planned for step in steps]
    shortest_us = min(takes_us)
    efficiencies, speeds = [work.efficiency(us) for us in ends_us], [shortest_us / us for us in takes_us]
    row: dict[str, Any] = {"steps": len(steps), "r2_of_efficiency": correlation(efficiencies, speeds) ** 2}
    for label, wanted in (("planned", True), ("random", False)):
        chosen = [at for at, is_planned in enumerate(planned) if is_planned == wanted]
        times_us = [takes_us[at] for at in chosen]
        row[label] = {
            "step_us": median(times_us),
            "predicted_us": median(ends_us[at] for at in chosen),
            "normalised_p95": shortest_us / quantiles(times_us, n=20)[-1],
            "straggler_share": mean(shares[at] for at in chosen),
        }
    row["throughput"] = row["random"]["step_us"] / row["planned"]["step_us"]
    return row


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"W": "{workers}", "S": "{servers}", "steps": "{steps}", "R^2 of E": "{r2_of_efficiency:.3f}"},
        **{"step us": "{planned[step_us]:.0f}", "predicted": "{planned[predicted_us]:.0f}"},
        **{"over random": "{throughput:.3f}", "p95": "{planned[normalised_p95]:.3f}"},
        **{"random p95": "{random[normalised_p95]:.3f}", "waiting": "{planned[straggler_share]:.1%}"},
        "random waiting": "{random[straggler_share]:.1%}",
    }
    yield table_of(f"{result['model']}, {result['paced']}", columns, result["rows"])
