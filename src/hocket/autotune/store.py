"""Decisions that outlive their process: a plan that is met again is checked, verified and compared briefly.

One file for each step, machine and version, in the user's cache folder and bounded in size. One that is damaged, edited
or of another step is ignored with one line in the log, and the step is searched as if there were none. A document is
read strictly, and nothing in it is run or unpickled::

    {"format": "hocket-decision/1",
     "about": {"graphs": {"": "5f0c..."}, "machine": {...}, "threads": 2, "torch": "2.13.0", ...},
     "decision": {"kind": "planned", "reason": "...", "speedup": 1.7, "low": 1.6, "high": 1.8, "eager_ms": [...],
                  "cores_of_others": 0.0},
     "plan": {"form": "", "split": false, "text": "...", "steps_ms": [...], "costs": {"format": "hocket-costs/1", ...}}}
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hocket.cache_folder import cache_folder, make_folder
from hocket.errors import InputError
from hocket.ir import Costs, Machine
from hocket.ir._fields import Reader, load_document, save_document
from hocket.ir.limits import processor_name
from hocket.version import VERSION

log = logging.getLogger(__name__)

FORMAT = "hocket-decision/1"
# Other programs that use less of the machine make no difference.
MAX_CORES_OF_OTHERS = 0.25
# They set how long idle threads of OpenMP spin, and so who is faster.
_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
STATE_FORMAT = "hocket-decisions/1"
# The limit for all files of a folder together; the least recently used ones are removed first.
MAX_FOLDER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RememberedPlan:
    """A plan as it was measured."""

    form: str  # name of the step's form, see `hocket.tracing.variants`
    split: bool  # the backward of convolutions was split
    text: str  # the plan, as ``str(plan)`` writes it
    steps_ms: tuple[float, ...]  # durations of its steps in the comparison, empty before that
    costs: Costs  # durations of its ops


@dataclass(frozen=True)
class Figures:
    """The outcome of a search or of turns, as it is stated and kept.

    Attributes:
        kind: ``planned``, ``eager``, or ``regions``: of a step, or of a graph of Dynamo's, whose regions are faster.
        reason: the reason in one line.
        speedup: of the best plan over eager, as a ratio of lower quartiles, or None if no plan was timed.
        low, high: the interval of the speedup (19 of 20 resamplings) at the moment of the comparison.
        eager_ms: the times of eager's steps.
        cores_of_others: what other programs used of the machine meanwhile.
    """

    kind: str
    reason: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    eager_ms: tuple[float, ...] = ()
    cores_of_others: float = 0.0

    @property
    def is_clear(self) -> bool:
        """True if one was faster, or nothing had to be compared."""
        return self.low is None or self.high is None or not self.low <= 1 <= self.high

    @property
    def figures(self) -> dict[str, Any]:
        """All of these by name."""
        return {each.name: getattr(self, each.name) for each in fields(Figures)}


@dataclass(frozen=True)
class Remembered(Figures):
    """A decision as it is kept (see `hocket.autotune.decision.Decision`)."""

    plan: RememberedPlan | None = None  # its best one

    @property
    def was_beside_others(self) -> bool:
        """True if other programs used the machine meanwhile: who is faster may hold only as long as they do."""
        return self.cores_of_others > MAX_CORES_OF_OTHERS


def about_step(
    fingerprints: Mapping[str, str], machine: Machine, *, planner: str, guard: bool, executor: str, numerics: str
) -> dict[str, Any]:
    """Everything that a decision depends on: the step as graphs, the machine, the versions and the options."""
    return {
        "graphs": dict(fingerprints),
        "machine": json.loads(json.dumps(machine.document())),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "spinning": {name: os.environ[name] for name in _SPINNING if name in os.environ},
        "torch": str(torch.__version__),
        "hocket": VERSION,
        "planner": planner,
        "guard": guard,
        "executor": executor,
        "numerics": numerics,
    }


def document_of(about: Mapping[str, Any], found: Remembered) -> dict[str, Any]:
    """A decision and what it is about, as JSON takes it: the fields of both classes by their names."""
    kept = None if found.plan is None else {**vars(found.plan), "costs": found.plan.costs.document()}
    return {"format": FORMAT, "about": dict(about), "decision": found.figures, "plan": kept}


def read_document(reader: Reader, about: Mapping[str, Any]) -> Remembered:
    """The decision of a document, or a `FormatError` where it does not read, or is about something else."""
    reader.only("format", "about", "decision", "plan")
    if reader["format"].text() != FORMAT:
        raise reader["format"].fail(f'expected "{FORMAT}"')
    if reader["about"].mapping() != about:
        raise reader["about"].fail("it is about another step, machine or version")
    decision = reader["decision"]
    decision.only("kind", "reason", "speedup", "low", "high", "eager_ms", "cores_of_others")
    kind = decision["kind"].text()
    plan = None if reader["plan"].value is None else _read_plan(reader["plan"])
    if kind not in ("planned", "eager", "regions") or (kind == "planned" and plan is None):
        raise decision["kind"].fail(f"expected planned (with a plan), regions or eager, got {kind!r}")
    eager_ms = _times(decision["eager_ms"])
    if kind == "planned" and plan is not None and bool(eager_ms) != bool(plan.steps_ms):
        raise reader["plan"]["steps_ms"].fail("expected times of the plan and of eager, or of neither")
    return Remembered(
        kind,
        decision["reason"].text(),
        decision["speedup"].optional_number(),
        decision["low"].optional_number(),
        decision["high"].optional_number(),
        eager_ms,
        decision.get("cores_of_others", 0.0).number(),
        plan,
    )


def _read_plan(reader: Reader) -> RememberedPlan:
    reader.only("form", "split", "text", "steps_ms", "costs")
    costs = reader["costs"]
    if costs["format"].text() != "hocket-costs/1":
        raise costs["format"].fail('expected "hocket-costs/1"')
    return RememberedPlan(
        reader["form"].text(),
        reader["split"].boolean(),
        reader["text"].text(),
        _times(reader["steps_ms"]),
        Costs.read(costs),
    )


def _times(reader: Reader) -> tuple[float, ...]:
    return tuple(element.number() for element in reader.elements())


def user_folder() -> Path:
    """The folder of decisions in the user's cache folder, used by default."""
    return cache_folder("decisions")


class DecisionStore:
    """The decisions of one schedule, and those of earlier ones in the files of `folder`, if it is not None."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._documents: dict[str, dict[str, Any]] = {}  # found, made or loaded; by key
        self._loaded: list[dict[str, Any]] = []  # what loaded ones are about

    @staticmethod
    def of(cache: bool | str | os.PathLike[str]) -> DecisionStore:
        """The store that a ``cache`` argument names: the user's, none, or that of a folder."""
        if isinstance(cache, bool):
            return DecisionStore(user_folder() if cache else None)
        if not isinstance(cache, (str, os.PathLike)):
            raise InputError(f"schedule: cache: expected True, False or a folder, got {type(cache).__name__}")
        return DecisionStore(Path(cache))

    @property
    def compiled_folder(self) -> Path | None:
        """Folder of compiled steps, beside that of decisions, or None."""
        if self.folder is None:
            return None
        return (self.folder.parent if self.folder == user_folder() else self.folder) / "compiled"

    def find(self, about: Mapping[str, Any]) -> Remembered | None:
        """The decision for this step on this machine, if there is one that reads."""
        key = _key_of(about)
        try:
            document = self._documents.get(key) or self._from_file(key)
            if document is None:
                self._explain(about)
                return None
            found = read_document(Reader(document, self._source(key), ""), about)
        except (OSError, InputError) as error:
            log.warning("hocket: a remembered decision is ignored: %s", error)
            return None
        self._documents[key] = document
        return found

    def keep(self, about: Mapping[str, Any], found: Remembered) -> None:
        """Remember a decision. The log says so if it cannot be written."""
        key = _key_of(about)
        try:
            document = json.loads(json.dumps(document_of(about, found), allow_nan=False))
            self._documents[key] = document
            if self.folder is None:
                return
            make_folder(self.folder)
            save_document(self._file(key), document)
            _bound(self.folder, self._file(key))
        except (OSError, ValueError) as error:  # no room, no right; or a time that is no number
            log.warning("hocket: the decision is not remembered: %s", error)

    def state(self) -> dict[str, Any]:
        """The decisions that this schedule has made or met, as plain values."""
        return {"format": STATE_FORMAT, "decisions": list(self._documents.values())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take in what `state` gave, perhaps in another process, or raise an `InputError`."""
        reader = Reader(state, "load_state_dict", "")
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise reader.fail(f'expected the state_dict() of a schedule ("format": "{STATE_FORMAT}")')
        found = [(element["about"].mapping(), element) for element in reader["decisions"].elements()]
        for about, element in found:
            read_document(element, about)
        for about, element in found:
            self._documents[_key_of(about)] = element.value
        self._loaded = [about for about, _ in found]

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.json"

    def _source(self, key: str) -> str:
        return str(self._file(key)) if self.folder is not None else "load_state_dict"

    def _from_file(self, key: str) -> dict[str, Any] | None:
        if self.folder is None:
            return None
        try:
            document = load_document(self._file(key), FORMAT).mapping()
        except FileNotFoundError:
            return None
        try:
            os.utime(self._file(key))
        except OSError as error:  # a folder that may only be read; it still tells what is remembered
            log.debug("hocket: %s", error)
        return document

    def _explain(self, about: Mapping[str, Any]) -> None:
        """Say once why nothing of what was loaded is used."""
        if self._loaded:
            fewest = min(
                ([name for name in about if about[name] != other.get(name)] for other in self._loaded), key=len
            )
            log.warning(
                "hocket: no loaded decision is for this step here (other %s); it is searched", ", ".join(fewest)
            )
            self._loaded = []


def _key_of(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def _bound(folder: Path, newest: Path) -> None:
    """Delete those files that were used longest ago, as long as all together take too much."""
    files = []
    for file in folder.glob("*.json"):
        try:
            files.append((file.stat().st_mtime, file.stat().st_size, file))
        except FileNotFoundError:  # another process has deleted it
            continue
    total_bytes = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total_bytes <= MAX_FOLDER_BYTES:
            break
        if file != newest:
            file.unlink(missing_ok=True)
            total_bytes -= size
