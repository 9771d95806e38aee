"""The verb of the command line that runs forwards on the parameters of a job as they change."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hocket.cli.console import print_json, print_tables, table
from hocket.cli.steps import wait_policy, working
from hocket.errors import InputError
from hocket.reporting.words import count_text, duration_text

if TYPE_CHECKING:
    from hocket.distributed.agent import Agent

__all__ = ["agent_verb"]


@dataclass(frozen=True)
class AgentSummary:
    """What an agent says of its calls."""

    target: str
    calls: int
    versions: list[int]
    planner: str
    call_us: float
    calls_us: list[float]
    predicted_us: float
    lower_us: float
    upper_us: float


def agent_verb(args: Namespace) -> None:
    """Run forwards of MODEL, each on the newest version that the job at ADDRESS has published."""
    wait_policy()
    with working(args, "wait for the job, and for a version") as (target, job, bar):
        from hocket import distribute

        if len(job.models) != 1:
            raise InputError(f"{job.name}: it has {count_text(len(job.models), 'model')}, and an agent takes one")
        seconds, versions = [], []
        options = {"order": args.order, "every_call": args.every_call, "ahead": not args.not_ahead}
        with distribute.agent(job.models[0].eval(), args.address, timeout_s=args.timeout, **options) as fresh:
            bar.update("run forwards")
            for call in range(args.calls):
                inputs = _inputs(job.batch(call))
                start = perf_counter()
                with target.blamed("the forward"):
                    fresh(inputs)
                seconds.append(perf_counter() - start)
                versions.append(fresh.version)
    made = _summary(job.name or args.target, fresh, seconds, versions)
    if args.format == "json":
        print_json(asdict(made))
        return
    rows = [
        ("call, median", duration_text(made.call_us)),
        ("call with a new version, predicted", duration_text(made.predicted_us)),
        ("order", made.planner),
        ("versions", f"{len(set(versions))}, from {versions[0]} to {versions[-1]}"),
    ]
    print_tables(table(f"{made.target}: {count_text(made.calls, 'call')}", ("", ""), rows))


def _inputs(batch: Any) -> Any:
    """What the model is called with: the first value of a batch of several."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _summary(target: str, fresh: Agent, seconds: list[float], versions: list[Any]) -> AgentSummary:
    assert fresh.plan is not None
    assert fresh.bounds is not None
    return AgentSummary(
        target=target,
        calls=fresh.calls,
        versions=versions,
        planner=fresh.plan.planner,
        call_us=median(seconds[1:] or seconds) * 1e6,  # the first one captures and plans
        calls_us=[each * 1e6 for each in seconds],
        predicted_us=fresh.predicted_us,
        lower_us=fresh.bounds.lower_us,
        upper_us=fresh.bounds.upper_us,
    )
