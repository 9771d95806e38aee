"""`explain`: steps of a job are watched and recorded, to say whether it can be planned and what keeps it from that.

A schedule stops at the first obstacle, since one is enough to stay eager. Here the watch goes on, and the step is
recorded all the same, so that everything that has to be changed is named at once. Nothing is timed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hocket.arguments import spreading
from hocket.autotune.options import unplannable
from hocket.autotune.recording import StepRecorder
from hocket.errors import CaptureError
from hocket.job import Job
from hocket.pystate.batches import unfolded
from hocket.pystate.drawn import NUM_DRAWN, DrawnAhead, ways
from hocket.pystate.step_parts import StepParts, is_end
from hocket.pystate.watch import MAX_WATCHED, PurityWatch, Watched
from hocket.step_regions import is_suitable
from hocket.tracing.captured import alone, captured_from
from hocket.tracing.reasons import REASONS
from hocket.tracing.recording.trace import Recorded
from hocket.tracing.sources import Entry
from hocket.tracing.state import inventory, leaf_of
from hocket.tracing.switches import obstacle

# Steps before the recorded one: the first one imports and allocates, the others are compared.
WATCHED_STEPS = 3
# Steps in a row that may end before their ops.
MAX_EARLY = 5
# A file's name may have spaces, and then stands behind "at" or in brackets.
_LINE = re.compile(r"(?:(?<= at )|(?<=\())(?:(?! at )[^()])+?\.py:\d+|[^\s()]+\.py:\d+")


@dataclass(frozen=True)
class Obstacle:
    """One thing that keeps a step from being planned."""

    line: str  # of the user's code, as ``train.py:12``. Empty where there is none to blame.
    reason: str  # what the step does there
    cure: str  # what helps. Empty where nothing is known to.

    @staticmethod
    def of(finding: str) -> Obstacle:
        """An obstacle of one sentence of the watch."""
        found = _LINE.findall(finding)
        line = found[-1] if found else ""
        reason, _, cure = finding.replace(f" ({line})", "").rpartition(": ")
        return Obstacle(line, reason or cure, cure if reason else "")


@dataclass(frozen=True)
class Explanation:
    """Verdict of `explain` on a step, with the obstacles."""

    name: str  # of the job
    roles: dict[str, int]  # the number of ops of each role in the step's graph. Empty where it cannot be one.
    written: tuple[str, ...]  # the names of what the step writes beside tensors, and a planned step writes, too
    obstacles: tuple[Obstacle, ...]  # what keeps the step from being one graph
    python: str = ""  # lines of the step that run as Python before and after the graph. Empty where there are none.
    has_regions: bool = False  # models and updates of the step may run by plan by themselves

    @property
    def verdict(self) -> str:
        """``one graph``, ``regions`` (eager where these are no faster) or ``eager``."""
        if not self.obstacles:
            return "one graph"
        return "regions" if self.has_regions else "eager"

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "target": self.name,
            "verdict": self.verdict,
            "ops": sum(self.roles.values()),
            "roles": self.roles,
            "written": list(self.written),
            "python": self.python,
            "obstacles": [asdict(one) for one in self.obstacles],
        }


def explain(job: Job) -> Explanation:
    """Make four to eight ordinary steps of a job and say whether it can be planned. The model is trained by them.

    Where the whole step cannot be, its middle is looked at in further steps, once for each way to divide it.
    """
    if reason := obstacle():
        return Explanation(job.name, {}, (), (Obstacle("", reason, "leave it before the step is called"),))
    whole = _Look(job, None, 0)
    found = whole.explanation()
    number = whole.number
    for parts in ways(whole.watch) if found.obstacles else ():
        look = _Look(job, parts, number)
        middle = look.explanation()
        if not middle.obstacles:
            return middle
        number = look.number
    return replace(found, has_regions=bool(found.obstacles) and is_suitable(whole.places, whole.watch))


class _Look:
    """Steps of a job that are watched and recorded."""

    def __init__(self, job: Job, parts: StepParts | DrawnAhead | None, number: int) -> None:
        self.job, self.parts, self.number = job, parts, number
        self.places = inventory(job.model, job.optimizer)
        roots = (*self.places.models, *self.places.optimizers)
        self.step = spreading(job.step if parts is None else parts.middle)
        self.watch = PurityWatch(job.step, roots) if parts is None else parts.watch(roots)

    def explanation(self) -> Explanation:
        found: dict[Obstacle, None] = {}
        if reason := unplannable(self.places):
            found[Obstacle("", reason, "")] = None
        try:
            for count in range(MAX_WATCHED):
                seen = self._made(lambda batch: self.watch.run(self.step, batch))
                if seen.before is not None:
                    found |= dict.fromkeys(map(Obstacle.of, seen.findings))
                if seen.settled and count + 1 >= WATCHED_STEPS:
                    break
            recorded, roles = self._recorded()
        except CaptureError as error:  # the step was not run
            return Explanation(self.job.name, {}, (), (*found, Obstacle.of(str(error))))
        if recorded.reason is not None:
            text, cure = REASONS[recorded.reason.kind]
            subject, line = recorded.reason.subject, recorded.reason.line
            found[Obstacle(line, text.format(subject=subject, line=line), cure)] = None
        watch = self.watch
        names = (*(place.name for place in watch.outputs), *(each.name for each in watch.appended.values()))
        written = tuple(name for name in names if not name.endswith(NUM_DRAWN))
        # The value at a place differs from step to step, the line and the cure do not.
        once = {(one.line, one.cure): one for one in reversed(found)}
        python = "" if self.parts is None else self.parts.lines
        return Explanation(self.job.name, roles, written, tuple(reversed(once.values())), python)

    def _made(self, run: Callable[[Any], Watched]) -> Watched:
        """The next step of the job that does not end early, of which `run` makes what is looked at."""
        for _ in range(MAX_EARLY):
            batch = self.job.batch(self.number)
            self.number += 1
            if self.parts is None:
                return run(unfolded(batch))
            own, kept = self.parts.begin(batch)
            if not is_end(kept):
                seen = run(unfolded(own))
                self.parts.end(batch, kept, seen.result)
                if self.parts.was_left:
                    raise CaptureError("what the step draws differs from step to step")
                return seen
        raise CaptureError("the step ends before its ops")

    def _recorded(self) -> tuple[Recorded, dict[str, int]]:
        """A recorded step, and how many ops of each role it has."""
        leaves: list[Entry] = []
        for _ in range(2):  # tensors that get gradients are known once one step was recorded
            recorder = StepRecorder(self.watch, self.places, self.job.model, self.job.optimizer, leaves)
            with alone():
                self._made(partial(self.watch.run, self.step, by=recorder))
            found = recorder.recorded
            if found.trace is not None:
                graph = captured_from(found.trace, recorder.signature, self.step, found.batch).graph
                return found, dict(Counter(op.role for op in graph.ops))
            if not found.leaves:
                break
            leaves = [leaf_of(tensor, "a tensor") for tensor in found.leaves]
        return found, {}
