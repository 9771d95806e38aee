"""The verb of the command line that spreads a step over several devices."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.checking import check
from hocket.cli.console import Bar, UsageError, emit, table
from hocket.cli.files import output_file, output_folder, written
from hocket.cli.targets import wait_policy, working
from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine
from hocket.ir._fields import write_text
from hocket.planning.partition import (
    Partition,
    PartitionProblem,
    PartPeaks,
    equal_devices,
    partitioned,
    partitioned_within,
    plan_of,
    problem_of,
)
from hocket.reporting import Report, parts_svg, write_report
from hocket.reporting.words import duration_text, percent_text, quantity_text

if TYPE_CHECKING:
    from hocket.tracing.captured import Captured

# Stands for a device's memory if it is unknown. It is finite, so that shares of it can be computed.
NO_LIMIT_BYTES = 1e18


def partition_verb(args: Namespace) -> None:
    """TARGET or GRAPH to a plan with a lane for each device."""
    target = output_file(args.output)
    folder = None if args.report is None else output_folder(args.report)
    if args.costs is not None and not _is_graph(args.target):
        raise UsageError("--costs: a target is measured or estimated; costs go with a graph")
    if _is_graph(args.target) and (args.batch_size is not None or args.optimizer is not None or args.settings):
        raise UsageError(f"{args.target}: --batch-size, --optimizer and --set are for zoo entries")
    if args.microbatches is not None and args.objective != "pipeline":
        raise UsageError("--microbatches is of the objective pipeline")
    machine = Machine.load(args.machine) if args.machine else equal_devices(Machine.here(), args.devices)
    if args.memory_bytes is not None:
        limited = tuple(replace(device, memory_bytes=float(args.memory_bytes)) for device in machine.devices)
        machine = replace(machine, devices=limited)
    graph, costs, machine, captured = _step(args, machine)
    with Bar("partition", moving=True):
        problem = problem_of(graph, costs, machine, expensive=args.expensive, twins=args.twins)
        search: dict[str, Any] = {
            "objective": args.objective,
            "epsilon": args.epsilon,
            "acyclic": args.acyclic,
            "micro_batches": args.microbatches or len(machine.devices),  # of the objective pipeline alone
            "budget_s": args.budget_s,
            "seed": args.seed or 0,
        }
        peaks_bytes: list[float] = []
        if graph.buffers:
            found, peaks_bytes = _within_memory(graph, problem, search)
        else:
            found = partitioned(problem, **search)
        plan = plan_of(found, machine)
        check(graph, plan, machine)
        if captured is not None:
            from hocket.distributed.stages.crossings import check_runs

            check_runs(captured, plan)
    if target is not None:
        write_text(target, str(plan))
    page = None
    if folder is not None:
        timelines = {"simulated, with transfers": found.timeline}
        paths = write_report(folder, Report(title="Parts", graph=graph, plan=plan, costs=costs, timelines=timelines))
        write_text(folder / "parts.svg", parts_svg(graph, plan, costs, title="Parts"))
        page = paths["index.html"]
    files = {name: str(path) for name, path in (("path", target), ("report", page)) if path is not None}
    document = {**_document(found, peaks_bytes), **files, "plan": str(plan)}
    if target is None and args.format == "table":
        print(plan, end="", flush=True)
    emit(args, document, *_tables(found, peaks_bytes), *written(target, page), to_stderr=target is None)


def _is_graph(words: str) -> bool:
    return words.endswith(".json")


def _step(args: Namespace, machine: Machine) -> tuple[Graph, Costs, Machine, Captured | None]:
    """Return the step's graph and costs, from files, or captured and estimated by the rates of this machine."""
    captured = None
    if _is_graph(args.target):
        if not Path(args.target).is_file():
            raise UsageError(f"no such file: {args.target}")
        graph = Graph.load(args.target)
        if args.costs is not None:
            return graph, Costs.load(args.costs), machine, None
    else:
        wait_policy()
        with working(args, "load the step", moving=True) as (target, job, bar):
            from hocket.distributed.stages.crossings import Borders
            from hocket.tracing import capture

            bar.update("capture")
            with target.blamed("the step"):
                captured = capture(job.step, job.model, job.optimizer, job.batch(0))
                graph = Borders(captured).graph
    from hocket.profiling.analytic import estimate, measure_rates

    with Bar("measure rates", moving=True):
        first = machine.devices[0]
        if first.flops_per_s is None or first.bytes_per_s is None:
            rates = measure_rates(Machine.here()).devices[0]
            assert rates.flops_per_s is not None
            assert rates.bytes_per_s is not None
            for device in machine.devices:
                machine = machine.with_rates(device.name, flops_per_s=rates.flops_per_s, bytes_per_s=rates.bytes_per_s)
        costs = estimate(graph, machine, device=first.name)
    return graph, costs, machine, captured


def _within_memory(graph: Graph, problem: PartitionProblem, search: dict[str, Any]) -> tuple[Partition, list[float]]:
    """Return a partition whose peaks fit into the devices, and the peaks, or name the device that none fits."""
    limits, held = problem.memory_limit_bytes, PartPeaks(graph, graph.order, problem.num_parts)
    bounded = [min(limit, NO_LIMIT_BYTES) for limit in limits.tolist()]
    found = partitioned_within(problem, search, bounded, held, is_promise=True)
    peaks = held.of(found.part)
    for device, peak, limit in zip(problem.devices, peaks, limits.tolist(), strict=True):
        if peak > limit:
            raise InputError(
                f"partition: device {device!r} would hold {peak:,.0f} bytes at its peak, and has {limit:,.0f}; no "
                "partition that was looked at needs less"
            )
    return found, peaks


def _document(found: Partition, peaks_bytes: Sequence[float]) -> dict[str, Any]:
    problem = found.problem
    parts = [
        {
            "device": device,
            "ops": found.part.count(number),
            "load_us": found.loads_us[number],
            **({"peak_bytes": peaks_bytes[number]} if peaks_bytes else {}),
        }
        for number, device in enumerate(problem.devices)
    ]
    return {
        "objective": found.objective,
        "bytes_moved": found.bytes_moved,
        "heaviest_us": max(found.loads_us),
        "imbalance": found.imbalance,
        "simulated_us": found.simulated_us,
        "cycle": None if found.cycle is None else [problem.devices[part] for part in found.cycle],
        "proved": found.proved,
        "ended_after_rounds": found.ended_after_rounds,
        "parts": parts,
    }


def _tables(found: Partition, peaks_bytes: Sequence[float]) -> tuple[Any, Any]:
    problem = found.problem
    work = sum(found.loads_us)
    rows = [
        (
            *(device, str(found.part.count(number)), duration_text(load_us)),
            percent_text(load_us / work if work else 0.0),
            *([quantity_text(peaks_bytes[number], "B")] if peaks_bytes else []),
        )
        for number, (device, load_us) in enumerate(zip(problem.devices, found.loads_us, strict=True))
    ]
    cycle = "none" if found.cycle is None else ", ".join(problem.devices[part] for part in found.cycle)
    facts = [
        ("bytes moved", quantity_text(found.bytes_moved, "B")),
        ("farthest from its target", percent_text(found.imbalance)),
        ("simulated step", duration_text(found.simulated_us) + (", no shorter one exists" if found.proved else "")),
        ("one device alone", duration_text(float(problem.duration_us.sum(axis=0).min()))),
        ("devices in a circle", cycle),
    ]
    if found.ended_after_rounds is not None:
        facts.append(("search", f"ended by its budget after {found.ended_after_rounds} rounds"))
    heads = ("device", "ops", "load with transfers", "share", *(["memory at its peak"] if peaks_bytes else []))
    return table("devices", heads, rows), table(f"parts by {found.objective}", ("", ""), facts)
