"""Sixty more steps with bookkeeping, written before it was known which are planned: a check of `loops.sixty`.

Each is a function that takes a `Job` and returns the step. All reach their books through one object, whose attribute
`state` has a name that code of torch uses, too.
"""

from __future__ import annotations

from loops.bookkeeping import draws, logs, meters, schedulers, trainers
from loops.bookkeeping.job import STEPS, Job

__all__ = ["STEPS", "Job", "draws", "logs", "meters", "schedulers", "trainers"]
