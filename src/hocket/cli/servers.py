"""The verb of the command line that trains on parameter servers."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hocket.cli.console import UsageError, note, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy
from hocket.cli.targets import Target
from hocket.errors import HocketError
from hocket.reporting.words import count_text, duration_text

if TYPE_CHECKING:
    from hocket.distributed.worker import DistributedStep
    from hocket.job import Job

__all__ = ["ps_verb"]

# What torchrun tells each process that it starts.
STARTED_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class JobSummary:
    """What rank 0 says of a job."""

    target: str
    workers: int
    servers: int
    steps: int
    planner: str
    order: dict[str, list[str]]
    steps_in_order: int
    step_us: float
    steps_us: list[float]
    predicted_us: float
    lower_us: float
    upper_us: float
    first_loss: float | None
    last_loss: float | None


def ps_verb(args: Namespace) -> None:
    """Train with so many workers and servers: one of the ranks of a torchrun job, or, alone, all of them."""
    if not all(name in os.environ for name in STARTED_BY_TORCHRUN):
        _start(args)
        return
    world = int(os.environ["WORLD_SIZE"])
    if world != args.workers + args.servers:
        raise UsageError(
            f"torchrun has started {world} ranks; {args.workers} workers and {args.servers} servers need "
            f"{args.workers + args.servers}"
        )
    wait_policy()
    path = None if args.output is None else output_file(args.output)
    target = Target(args.target, args.batch_size, args.optimizer, args.seed, dict(args.settings), None)
    rank = int(os.environ["RANK"])
    with redirect_stdout(sys.stderr):
        job = target.job()
        if rank >= args.workers:
            _serve(args, job)
            return
        made = _work(args, target, job, rank)
        if rank == 0 and path is not None:
            _save(job, path)
    if rank == 0:
        _tell(args, made)


def _start(args: Namespace) -> None:
    """Start all ranks on this machine, with torchrun, and end as they do."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(args.workers + args.servers), "-m", "hocket", *_words(args)]
    status = subprocess.run(words, check=False).returncode
    if status:
        raise HocketError(f"{args.target}: a rank has failed; what it said stands above")


def _words(args: Namespace) -> list[str]:
    """The same command line again."""
    given = {
        "--workers": args.workers,
        "--servers": args.servers,
        "--order": args.order,
        "--steps": args.steps,
        "--timeout": args.timeout,
        "--publish-every": args.publish_every,
        "--output": args.output,
        "--format": args.format,
        "--batch-size": args.batch_size,
        "--optimizer": args.optimizer,
        "--seed": args.seed,
    }
    words = ["ps", args.target]
    for option, value in given.items():
        words += [option, str(value)] if value is not None else []
    for key, value in args.settings:
        words += ["--set", f"{key}={value}"]
    words += ["--survive"] if args.survive else []
    return [*words, *(["--traceback"] if args.traceback else [])]


def _serve(args: Namespace, job: Job) -> None:
    from hocket import distribute

    settings = {"num_servers": args.servers, "timeout_s": args.timeout, "survive": args.survive}
    distribute.server(job.step, job.model, job.optimizer, job.batch(0), **settings)


def _work(args: Namespace, target: Target, job: Job, rank: int) -> JobSummary:
    from hocket import distribute

    fast = distribute.worker(
        *(job.step, job.model, job.optimizer),
        num_servers=args.servers,
        order=args.order,
        timeout_s=args.timeout,
    )
    seconds, in_order, losses = [], 0, []
    if args.publish_every is not None and rank == 0:
        note(f"agents: hocket agent {args.target} {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    with fast:
        with target.blamed("the step"):
            first = fast.start(job.batch(rank))
        for step in range(first, args.steps):
            batch = job.batch(step * args.workers + rank)
            start = perf_counter()
            with target.blamed("the step"):
                loss = fast(batch)
            seconds.append(perf_counter() - start)
            losses.append(_number(loss))
            in_order += fast.arrivals() == _planned(fast)
            if args.publish_every is not None and fast.steps % args.publish_every == 0:
                fast.publish()
        fast.gather()
    return _summary(args, job, fast, seconds, in_order, losses)


def _summary(
    args: Namespace, job: Job, fast: DistributedStep, seconds: list[float], in_order: int, losses: list[float | None]
) -> JobSummary:
    assert fast.plan is not None
    return JobSummary(
        target=job.name or args.target,
        workers=args.workers,
        servers=args.servers,
        steps=args.steps,
        planner=fast.plan.planner,
        order={server: list(names) for server, names in _planned(fast).items()},
        steps_in_order=in_order,
        step_us=median(seconds[1:] or seconds) * 1e6,  # the first one warms up
        steps_us=[each * 1e6 for each in seconds],
        predicted_us=fast.predicted_us,
        lower_us=fast.bounds.lower_us if fast.bounds is not None else 0.0,
        upper_us=fast.bounds.upper_us if fast.bounds is not None else 0.0,
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def _planned(fast: DistributedStep) -> dict[str, tuple[str, ...]]:
    """For each server the parameters in the order of the plan."""
    assert fast.plan is not None
    lanes = {lane.device.partition("->")[0]: lane for lane in fast.plan.lanes if lane.device.startswith("server")}
    return {
        server: tuple(op.removeprefix("pull:") for op in lanes[server].ops) if server in lanes else ()
        for server in fast.arrivals()
    }


def _number(value: Any) -> float | None:
    """A loss, where the step returns one number, and a finite one, which JSON can say."""
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if isfinite(found) else None


def _save(job: Job, path: Any) -> None:
    import torch

    states = {
        "model": [model.state_dict() for model in job.models],
        "optimizer": [optimizer.state_dict() for optimizer in job.optimizers],
    }
    torch.save(states, path)
    note(f"checkpoint of the plain model and optimizer: {path}")


def _tell(args: Namespace, made: JobSummary) -> None:
    if args.format == "json":
        print_json(asdict(made))
        return
    rows = [
        ("step, median", duration_text(made.step_us)),
        ("step, predicted", duration_text(made.predicted_us)),
        ("order", made.planner),
        ("steps in which parameters arrived in this order", f"{made.steps_in_order} of {made.steps}"),
        *([("loss", f"{made.first_loss:.6g} to {made.last_loss:.6g}")] if made.last_loss and made.first_loss else []),
    ]
    workers, servers = count_text(made.workers, "worker"), count_text(made.servers, "server")
    print_tables(table(f"{made.target}: {workers}, {servers}, {count_text(made.steps, 'step')}", ("", ""), rows))
