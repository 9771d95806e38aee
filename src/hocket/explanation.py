"""`explain`: steps of a job are watched and recorded, to say whether it can be planned and what keeps it from that.

A schedule stops at the first obstacle, since one is enough to stay eager. Here the watch goes on, and the step is
recorded all the same, so that everything that has to be changed is named at once. Nothing is timed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.arguments import spreading
from hocket.autotune.device import unplannable
from hocket.errors import CaptureError
from hocket.job import Job
from hocket.pystate.batches import unfolded
from hocket.pystate.watch import MAX_WATCHED, PurityWatch
from hocket.tracing.captured import alone, captured_from
from hocket.tracing.reasons import REASONS
from hocket.tracing.recording.record import Recorded, record_step
from hocket.tracing.signature import signature_of
from hocket.tracing.state import Inventory, inventory, leaf_of

__all__ = ["Explanation", "Obstacle", "explain"]

# Steps before the recorded one: the first one imports and allocates, the others are compared.
WATCHED_STEPS = 3
_LINE = re.compile(r"[^\s()]+\.py:\d+")


@dataclass(frozen=True)
class Obstacle:
    """One thing that keeps a step from being planned.

    Attributes:
        line: of the user's code, as ``train.py:12``. Empty where there is none to blame.
        reason: what the step does there.
        cure: what helps. Empty where nothing is known to.
    """

    line: str
    reason: str
    cure: str

    @staticmethod
    def of(finding: str) -> Obstacle:
        """An obstacle of one sentence of the watch.

        Example:
            >>> Obstacle.of("it changes n (1 -> 2): count outside the step (train.py:12)")
            Obstacle(line='train.py:12', reason='it changes n (1 -> 2)', cure='count outside the step')
        """
        found = _LINE.findall(finding)
        line = found[-1] if found else ""
        reason, _, cure = finding.replace(f" ({line})", "").rpartition(": ")
        return Obstacle(line, reason or cure, cure if reason else "")


@dataclass(frozen=True)
class Explanation:
    """Verdict of `explain` on a step, with the obstacles.

    Attributes:
        name: of the job.
        roles: the number of ops of each role in the step's graph. Empty where it cannot be one.
        written: the names of what the step writes beside tensors, and a planned step writes, too.
        obstacles: what keeps the step from being one graph.
    """

    name: str
    roles: dict[str, int]
    written: tuple[str, ...]
    obstacles: tuple[Obstacle, ...]

    @property
    def verdict(self) -> str:
        """``one graph`` or ``eager``."""
        return "eager" if self.obstacles else "one graph"

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        obstacles = [{"line": one.line, "reason": one.reason, "cure": one.cure} for one in self.obstacles]
        return {
            "target": self.name,
            "verdict": self.verdict,
            "ops": sum(self.roles.values()),
            "roles": self.roles,
            "written": list(self.written),
            "obstacles": obstacles,
        }


def explain(job: Job) -> Explanation:
    """Make four to eight ordinary steps of a job and say whether it can be planned. The model is trained by them.

    Raises:
        Exception: whatever the step raises.

    Example:
        >>> from hocket import zoo
        >>> explain(zoo.load("mlp", depth=2, width=8)).verdict
        'one graph'
    """
    places = inventory(job.model, job.optimizer)
    step = spreading(job.step)
    watch = PurityWatch(job.step, (*places.models, *places.optimizers))
    found: dict[Obstacle, None] = {}
    if reason := unplannable(places):
        found[Obstacle("", reason, "")] = None
    number = 0
    for number in range(MAX_WATCHED):
        try:
            seen = watch.run(step, unfolded(job.batch(number)))
        except CaptureError as error:  # the step was not run
            return Explanation(job.name, {}, (), (*found, Obstacle.of(str(error))))
        if seen.before is not None:
            found |= dict.fromkeys(map(Obstacle.of, seen.findings))
        if seen.settled and number + 1 >= WATCHED_STEPS:
            break
    recorded, roles = _recorded(job, step, watch, places, number + 1)
    if recorded.reason is not None:
        text, cure = REASONS[recorded.reason.kind]
        subject, line = recorded.reason.subject, recorded.reason.line
        found[Obstacle(line, text.format(subject=subject, line=line), cure)] = None
    written = (*(place.name for place in watch.outputs), *(each.name for each in watch.appended.values()))
    # What a place holds differs from step to step, the line and the cure do not.
    once = {(one.line, one.cure): one for one in reversed(found)}
    return Explanation(job.name, roles, written, tuple(reversed(once.values())))


def _recorded(
    job: Job, step: Callable[[Any], Any], watch: PurityWatch, places: Inventory, number: int
) -> tuple[Recorded, dict[str, int]]:
    """A recorded step, and how many ops of each role it has."""
    recorded: list[Recorded] = []

    def recording(step: Callable[[Any], Any], batch: Any) -> Any:
        leaves = [leaf_of(tensor, "a tensor") for tensor in recorded[-1].leaves] if recorded else []
        found = record_step(
            step,
            job.model,
            job.optimizer,
            batch,
            further=watch.outputs,
            leaves=leaves,
            appended=tuple(watch.appended.values()),
            live_leaves=frozenset(watch.live_leaves),
            follows=watch.executed.follows_numbers,
            settles=bool(watch.executed.strict),
        )
        recorded.append(found)
        return found.result

    for following in range(2):  # tensors that get gradients are known once one step was recorded
        batch = unfolded(job.batch(number + following))
        signature = signature_of(places, batch)
        with alone():
            watch.run(step, batch, counts=False, by=recording)
        trace = recorded[-1].trace
        if trace is not None:
            graph = captured_from(trace, signature, step, batch).graph
            return recorded[-1], dict(Counter(op.role for op in graph.ops))
        if not recorded[-1].leaves:
            break
    return recorded[-1], {}
