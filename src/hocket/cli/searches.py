"""The verb of the command line that searches for hyper-parameters."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from contextlib import redirect_stdout
from math import isfinite
from typing import Any

from hocket.cli.console import UsageError, print_json, print_tables, table
from hocket.cli.steps import wait_policy
from hocket.cli.targets import Target
from hocket.errors import InputError

__all__ = ["tune_verb"]


def tune_verb(args: Namespace) -> None:
    """Run the search that a function makes, and say how its trials did."""
    wait_policy()
    target = Target(args.target)
    path = target.path
    if path is None:
        raise UsageError(f"{args.target}: expected file.py:function")
    with redirect_stdout(sys.stderr):
        study = target.result(path)
    if not all(hasattr(study, name) for name in ("best_trials", "trials", "directions")):
        got = "None" if study is None else f"a value of type {type(study).__name__}"
        raise InputError(f"{args.target}: expected it to return the study of hocket.tune(...), got {got}")
    if len(study.directions) != 1:
        raise UsageError(f"{args.target}: expected a study of one direction, got {len(study.directions)}")
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    maximize = study.direction.name == "MAXIMIZE"
    best = sorted(complete, key=lambda trial: (-trial.value if maximize else trial.value, trial.number))[: args.top]
    counts = Counter(trial.state.name.lower() for trial in study.trials)
    if args.format == "json":
        shown = [_plain({"number": trial.number, "value": trial.value, "params": trial.params}) for trial in best]
        print_json({"study": study.study_name, "trials": dict(counts), "best": shown})
        return
    words = ", ".join(f"{number} {state}" for state, number in counts.items())
    title = f"{study.study_name}: {len(study.trials)} trials, {words}"
    names = list(dict.fromkeys(name for trial in best for name in trial.params))
    rows = [
        (str(trial.number), f"{trial.value:.6g}", *(_shown(trial.params.get(name)) for name in names)) for trial in best
    ]
    print_tables(table(title, ("trial", "value", *names), rows))


def _plain(value: Any) -> Any:
    """A value as JSON has it; what JSON does not have, such as infinity, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    is_known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if is_known else str(value)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
