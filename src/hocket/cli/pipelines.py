"""``hocket run TARGET --ranks K``: the target's model as a pipeline over K processes."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hocket.cli.console import UsageError, emit, table
from hocket.cli.servers import start_ranks, started_by_torchrun
from hocket.cli.steps import run_verb
from hocket.cli.targets import Target, wait_policy, working
from hocket.ir.limits import usable_cpus
from hocket.reporting.words import count_text, duration_text, quantity_text

if TYPE_CHECKING:
    from hocket.distributed.pipelines.run import PipelineRun

__all__ = ["run_or_pipeline"]

# Options of `hocket run` that a pipeline does not take, with their defaults.
_NOT_FOR_PIPELINES = {
    "planner": "auto",
    "plan": None,
    "simulate": None,
    "numerics": "bitwise",
    "strict": False,
    "report": None,
    "device": None,
}


def run_or_pipeline(args: Namespace) -> None:
    """``hocket run``, with ``--ranks`` or without."""
    if args.ranks is not None:
        _pipeline(args)
    elif args.microbatches or args.schedule or args.memory_bytes:
        raise UsageError("--microbatches, --schedule and --memory-bytes are of a pipeline: add --ranks")
    else:
        run_verb(args)


def _pipeline(args: Namespace) -> None:
    """Run a step in stages: one of the ranks of a torchrun job, or, alone, all of them."""
    wait_policy()
    for name, default in _NOT_FOR_PIPELINES.items():
        if getattr(args, name) != default:
            raise UsageError(f"--{name}: not with --ranks: stages run eagerly, on CPUs")
    microbatches = args.microbatches or args.ranks
    if microbatches < args.ranks:
        raise UsageError(f"--microbatches: {microbatches} for {args.ranks} ranks: fewer than one for each")
    if not started_by_torchrun():
        _check(args, microbatches)
        start_ranks(args, args.ranks)
        return
    world = int(os.environ["WORLD_SIZE"])
    if world != args.ranks:
        raise UsageError(f"torchrun has started {world} ranks, and --ranks is {args.ranks}")
    target = Target.of(args)
    with redirect_stdout(sys.stderr):
        made = _run(args, target, microbatches)
    if os.environ["RANK"] == "0":
        _tell(args, made, microbatches)


def _check(args: Namespace, microbatches: int) -> None:
    """Refuse a step that cannot be a pipeline before ranks are started, each of which would report it."""
    from hocket.distributed.pipelines.run import check_pipeline

    with working(args, "load the step", moving=True) as (target, job, bar):
        bar.update("trace the model")
        with target.blamed("the step as a pipeline"):
            check_pipeline(
                job,
                ranks=args.ranks,
                microbatches=microbatches,
                schedule=args.schedule or "1f1b",
                memory_bytes=args.memory_bytes,
            )


def _run(args: Namespace, target: Target, microbatches: int) -> PipelineRun:
    import torch
    import torch.distributed as dist

    from hocket.distributed.pipelines.run import run_pipeline

    cores = usable_cpus()
    torch.set_num_threads(args.threads or max(1, cores // args.ranks))
    job = target.job()
    dist.init_process_group("gloo")
    try:
        with target.blamed("the step as a pipeline"):
            return run_pipeline(
                job,
                microbatches=microbatches,
                schedule=args.schedule or "1f1b",
                runs=args.runs,
                memory_bytes=args.memory_bytes,
            )
    finally:
        dist.destroy_process_group()


def _tell(args: Namespace, made: PipelineRun, microbatches: int) -> None:
    cut = made.cut
    rows = [
        (
            str(number),
            str(stage.rank),
            f"{stage.ops:,}",
            duration_text(stage.forward_us),
            duration_text(stage.backward_us),
            quantity_text(stage.received_bytes, "B"),
            quantity_text(stage.kept_bytes, "B"),
            f"{stage.in_flight} x {quantity_text(stage.saved_bytes, 'B')}",
        )
        for number, stage in enumerate(cut.stages)
    ]
    columns = ("stage", "rank", "ops", "forward", "backward", "received", "parameters", "saved")
    facts = [
        ("step, measured", duration_text(made.step_us)),
        ("step, predicted", duration_text(cut.step_us)),
        ("eager, one process", duration_text(made.eager_us)),
        ("farthest gradient from eager's", f"{made.gradient_error:.2g}"),
        ("largest memory of a rank", quantity_text(max(cut.memory_bytes), "B")),
        ("link", f"{duration_text(made.link.latency_us)}, {quantity_text(made.link.bytes_per_s, 'B')}/s"),
    ]
    title = (
        f"{args.target}: {count_text(len(cut.stages), 'stage')} on {count_text(args.ranks, 'rank')}, "
        f"{cut.order.schedule}, {microbatches} micro-batches"
    )
    summary = table(f"forward and backward, {count_text(made.threads, 'thread')} a rank", ("", ""), facts)
    summary.show_header = False
    emit(args, _document(args, made, microbatches), table(title, columns, rows), summary)


def _document(args: Namespace, made: PipelineRun, microbatches: int) -> dict[str, Any]:
    cut = made.cut
    return {
        "target": args.target,
        "ranks": args.ranks,
        "microbatches": microbatches,
        "schedule": cut.order.schedule,
        "threads": made.threads,
        "stages": [stage._asdict() for stage in cut.stages],
        "memory_bytes": list(cut.memory_bytes),
        "predicted_us": cut.step_us,
        "measured_us": made.step_us,
        "steps_us": list(made.steps_us),
        "eager_us": made.eager_us,
        "gradient_error": made.gradient_error,
        "link": asdict(made.link),
    }
