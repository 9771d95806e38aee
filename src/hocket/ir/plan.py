"""`Plan`: lanes, and on each lane the ops in order.

The rule: *each lane runs its ops in order, and an op starts when its lane has reached it and every op it depends on has
finished.* A lane is a set of cores with a fixed width, a stream with a priority, or a channel between two processes.
An op may also wait for ops that it does not depend on (``after``). Lanes that share a core take turns in this way.

A plan is text, one action a line, and diffs well::

    hocket-plan/1 planner=list
    lane cpu0.0 kind=cores device=cpu0 width=1 cores=0
    run conv1
    run relu1
    lane cpu0.1 kind=cores device=cpu0 width=1 cores=1
    run conv2 after=conv1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hocket.errors import FormatError
from hocket.ir._fields import MAX_DIGITS, read_from, shortened

if TYPE_CHECKING:
    from hocket.ir.graph import Graph
    from hocket.ir.machine import Device

FORMAT = "hocket-plan/1"

_HEADER = ("planner", "peak_bytes", "eager_peak_bytes")

LANE_KINDS = ("cores", "stream", "channel")


@dataclass(frozen=True)
class Lane:
    """Ops of a plan that run one after another, and the device or link that they run on.

    Attributes:
        name: unique in its plan.
        ops: names of ops, in the order in which the lane runs them.
        kind: ``cores``, ``stream`` or ``channel``.
        device: the device that it runs on, or ``src->dst`` for a channel.
        width: threads that an op on this lane uses (``cores`` lanes).
        cores: cores of the device, counted from 0, or empty for a lane that is not pinned. On a device of n cores,
            c + k * n is the k-th further hardware thread of core c. A lane that names one is as wide as its threads.
        priority: of a stream. Higher runs first.
    """

    name: str
    ops: tuple[str, ...] = ()
    kind: str = "cores"
    device: str = "cpu0"
    width: int = 1
    cores: tuple[int, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        object.__setattr__(self, "cores", tuple(self.cores))

    @property
    def ends(self) -> tuple[str, str]:
        """Source and destination of a channel."""
        src, _, dst = self.device.partition("->")
        return src, dst


@dataclass(frozen=True)
class Plan:
    """Lanes with their ops in order, and orders beyond the graph's edges.

    Attributes:
        lanes: each with its ops in order.
        after: op -> ops it waits for in addition to the graph's edges.
        planner: the name of the planner that made it.
        peak_bytes: peak memory of a step as its planner predicts it, None if unknown.
        eager_peak_bytes: the same for the ops one after another in program order, as eager runs them.

    Raises `FormatError` at construction for what is wrong with any graph: two lanes of one name, an op that is run
    twice, a width below 1. `hocket.check` decides if the plan fits a graph and a machine.

    Example:
        >>> plan = Plan((Lane("main", ("a", "b")),))
        >>> Plan.parse(str(plan)) == plan
        True
    """

    lanes: tuple[Lane, ...]
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    planner: str = ""
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", tuple(self.lanes))
        object.__setattr__(self, "after", {op: tuple(before) for op, before in self.after.items() if before})
        _check(self)

    @cached_property
    def lane_of(self) -> dict[str, Lane]:
        """The lane of each op."""
        return {op: lane for lane in self.lanes for op in lane.ops}

    def __len__(self) -> int:
        return sum(len(lane.ops) for lane in self.lanes)

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        words = [FORMAT]
        for key in _HEADER:
            value = getattr(self, key)
            if value is not None and value != "":
                words.append(f"{key}={value}")
        yield " ".join(words)
        for lane in self.lanes:
            words = [f"lane {lane.name} kind={lane.kind} device={lane.device}"]
            if lane.kind == "cores":
                words.append(f"width={lane.width}")
                if lane.cores:
                    words.append(f"cores={','.join(map(str, lane.cores))}")
            if lane.priority:
                words.append(f"priority={lane.priority}")
            yield " ".join(words)
            for op in lane.ops:
                waits = self.after.get(op)
                yield f"run {op} after={','.join(waits)}" if waits else f"run {op}"

    @staticmethod
    def parse(text: str, source: str = "plan") -> Plan:
        """Read what ``str(plan)`` wrote. Blank lines and lines that begin with ``#`` are passed over.

        Raises:
            FormatError: names the line and what was expected there.
        """
        header: dict[str, Any] = {}
        seen_header = False
        lanes: list[tuple[Lane, list[str]]] = []
        after: dict[str, tuple[str, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            where = f"line {number}"
            if not seen_header:
                if words[0] != FORMAT:
                    raise FormatError(source, where, f"expected {FORMAT!r}, got {words[0]!r}")
                header = _read_header(words[1:], source, where)
                seen_header = True
            elif words[0] == "lane" and len(words) >= 2:
                lanes.append((_parse_lane(words, source, where), []))
            elif words[0] == "run" and len(words) >= 2:
                if not lanes:
                    raise FormatError(source, where, f"op {words[1]!r} stands before the first lane")
                lanes[-1][1].append(words[1])
                waits = _options(words[2:], ("after",), source, where).get("after")
                if waits:
                    after[words[1]] = tuple(waits.split(","))
            else:
                raise FormatError(source, where, f"expected 'lane NAME ...' or 'run OP', got {line.strip()!r}")
        if not seen_header:
            raise FormatError(source, "", f"empty; expected a first line {FORMAT!r}")
        with read_from(source):
            return Plan(tuple(replace(lane, ops=tuple(ops)) for lane, ops in lanes), after, **header)


def one_by_one(graph: Graph, order: Sequence[str], widths: Mapping[str, int], device: Device) -> Plan:
    """The plan that runs all ops one after another: a lane for each width, all of them on the first cores.

    In `order` each op comes after those that it waits for. Widths may be more than there are cores.
    """
    lanes: dict[int, list[str]] = {} if order else {device.cores: []}
    after: dict[str, tuple[str, ...]] = {}
    for op in order:
        lanes.setdefault(widths[op], []).append(op)
    for before, op in pairwise(order):
        if widths[before] != widths[op] and before not in graph.predecessors[op]:
            after[op] = (before,)
    widest = max(lanes)
    return Plan(
        tuple(
            Lane(
                device.name if width == widest else f"{device.name}.{width}",
                *(tuple(lanes[width]), "cores", device.name, width, tuple(range(min(width, device.cores)))),
            )
            for width in sorted(lanes, reverse=True)
        ),
        after,
        planner="serial",
    )


def _read_header(words: list[str], source: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(_options(words, _HEADER, source, where))
    for key in _HEADER[1:]:
        if key in found:
            if not found[key].isdecimal() or len(found[key]) > MAX_DIGITS:
                got = shortened(found[key])
                raise FormatError(source, where, f"expected {key} to be a whole number >= 0, got {got}")
            found[key] = int(found[key])
    return found


def _options(words: list[str], allowed: tuple[str, ...], source: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in allowed:
            raise FormatError(source, where, f"expected {' '.join(f'{a}=...' for a in allowed)}, got {word!r}")
        found[key] = value
    return found


def _parse_lane(words: list[str], source: str, where: str) -> Lane:
    options = _options(words[2:], ("kind", "device", "width", "cores", "priority"), source, where)
    try:
        return Lane(
            name=words[1],
            kind=options.get("kind", "cores"),
            device=options.get("device", "cpu0"),
            width=int(options.get("width", "1")),
            cores=tuple(int(core) for core in options.get("cores", "").split(",") if core),
            priority=int(options.get("priority", "0")),
        )
    except ValueError as error:
        raise FormatError(source, where, f"lane {words[1]!r}: {error}") from None


def _check(plan: Plan) -> None:
    if any(character.isspace() for character in plan.planner):
        raise FormatError("plan", "planner", f"expected a name without white space, got {plan.planner!r}")
    for key in _HEADER[1:]:
        value = getattr(plan, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise FormatError("plan", key, f"expected a whole number >= 0, got {value!r}")
    seen: dict[str, str] = {}
    names: set[str] = set()
    for position, lane in enumerate(plan.lanes):
        where = f"lanes[{position}]"
        if lane.name in names:
            raise FormatError("plan", where, f"duplicate lane name {lane.name!r}")
        names.add(lane.name)
        for text in (lane.name, lane.device):
            if not text or any(character.isspace() for character in text):
                raise FormatError("plan", where, f"expected a name without white space, got {text!r}")
        if lane.kind not in LANE_KINDS:
            raise FormatError(
                "plan", where, f"lane {lane.name!r}: unknown kind {lane.kind!r}; one of {', '.join(LANE_KINDS)}"
            )
        if lane.kind != "cores" and (lane.width != 1 or lane.cores):
            raise FormatError("plan", where, f"lane {lane.name!r}: only a lane of cores has a width and cores")
        if lane.width < 1:
            raise FormatError("plan", where, f"lane {lane.name!r}: expected a width of at least 1, got {lane.width}")
        if lane.kind == "channel" and not all(lane.ends):
            raise FormatError("plan", where, f"lane {lane.name!r}: expected device=SRC->DST, got {lane.device!r}")
        if len(set(lane.cores)) != len(lane.cores) or any(core < 0 for core in lane.cores):
            raise FormatError(
                "plan", where, f"lane {lane.name!r}: expected different cores counted from 0, got {lane.cores}"
            )
        for op in lane.ops:
            if op.split() != [op]:
                raise FormatError("plan", where, f"expected an op name without white space, got {op!r}")
            if op in seen:
                raise FormatError("plan", where, f"op {op!r} is run twice: on lane {seen[op]!r} and on {lane.name!r}")
            seen[op] = lane.name
    for op, before in plan.after.items():
        for name in (op, *before):
            if name not in seen:
                raise FormatError("plan", f"after[{op!r}]", f"names an op that no lane runs: {name!r}")
            if "," in name:
                raise FormatError("plan", f"after[{op!r}]", f"an op named in `after` may not hold a comma: {name!r}")
