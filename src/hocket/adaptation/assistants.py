"""Assistants decide which ops move from an overloaded device to another one, by numbers that all ranks have.

Tavarageri et al., section 3: a device whose use of a resource passes theta puts an op so tagged into its out-box, and a
device below gamma takes it. By the paper alone this neither ends nor goes far enough. Three choices are added here:

- **which op**: the unit (see `units.py`) with which the predicted step is the shortest. The step is predicted by list
  scheduling on the devices, with the measured slowdown of each device and the transfer time of each flow between
  devices, and devices run their ops in that order. If the measured step takes longer, transfers are scaled by one
  factor: beside another program they wait for a core, too.
- **the receiver**: devices below gamma first, then any other that is not above theta. If one of two devices has become
  half as fast, the other is above gamma after the first move, with most of the loss still to recover.
- **when to stop**: moves are made if together they save `margin` of the predicted step, pay within `horizon_steps` for
  the state that moves and for the pause, and leave no device more loaded than the most loaded one was. With constant
  measurements each decision shortens the predicted step by that, so decisions end, and none is reversed.

    gathered numbers --decide--> moves      the same on every rank: no vote, no clock, nothing drawn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from hocket.adaptation.assistant_rules import RESOURCES, AssistantRules, Resource
from hocket.errors import InputError
from hocket.ir import Timeline

# Ops of a device that are tried, and devices that each is tried on.
CANDIDATES = 16
TAKERS = 3
ROUNDING = 1e-9
# The largest factor by which transfers are assumed slower than their links.
MAX_DELAY = 64.0


@dataclass(frozen=True)
class DeviceShare:
    """Measurements of a device since the last moves.

    Raises `InputError` at construction for a share outside of [0, 1], a slowdown that is not above 0, or a negative
    number of steps or microseconds.
    """

    compute: float  # the share of its arithmetic that was used, by this job or others, between 0 and 1
    memory: float = 0.0  # the same of its memory traffic
    network: float = 0.0  # the same of its links
    slowdown: float = 1.0  # measured over planned duration of its ops
    steps: int = 1_000_000  # the number of measured steps
    step_us: float = 0.0  # the duration of a step there, waiting included. 0 if not known.

    def __post_init__(self) -> None:
        if not all(0 <= self.of(resource) <= 1 for resource in RESOURCES):
            raise InputError(f"assistants: expected shares between 0 and 1, got {self}")
        if not 0 < self.slowdown < float("inf") or self.steps < 0 or not 0 <= self.step_us < float("inf"):
            raise InputError(f"assistants: expected a slowdown above 0, steps and step_us from 0 on, got {self}")

    def of(self, resource: Resource) -> float:
        """The share of one resource."""
        return {"compute": self.compute, "memory": self.memory, "network": self.network}[resource]


class OpMove(NamedTuple):
    """An op, by its position, that goes from one device to another."""

    op: int
    source: int
    target: int


def decide(shares: Sequence[DeviceShare], rules: AssistantRules, assignment: Sequence[int]) -> tuple[OpMove, ...]:
    """Return the ops that move now, which are none in most steps. `assignment` has the device of each op of the rules.

    Shares and rules are the same on every rank.
    """
    if len(shares) != len(rules.devices) or len(assignment) != len(rules.ops):
        raise InputError(
            f"assistants: rules of {len(rules.devices)} devices and {len(rules.ops)} ops, got shares of {len(shares)} "
            f"and an assignment of {len(assignment)}"
        )
    if any(share.steps < rules.settle_steps for share in shares):
        return ()
    slowdown, delay = [share.slowdown for share in shares], transfer_delay(shares, rules, assignment)
    begin = _judged(rules, assignment, slowdown, delay)
    now = list(assignment)
    tried: list[tuple[tuple[float, float], tuple[OpMove, ...]]] = []
    while len(tried) < rules.max_moves:
        moved = {rules.unit_of[moves[0].op] for _, moves in tried}
        found = _best_move(shares, rules, now, delay, begin[1], moved)
        if found is None:
            break
        for move in found[1]:
            now[move.op] = move.target
        tried.append(found)
    if not tried:
        return ()
    # Kernighan and Lin: a move may cost something that a later one brings; what counts is the best of all beginnings.
    enough = min(range(len(tried)), key=lambda number: (tried[number][0], number)) + 1
    moves = tuple(move for _, of_unit in tried[:enough] for move in of_unit)
    saved_us = begin[0] - tried[enough - 1][0][0]
    state_us = sum(rules.ops[move.op].state_bytes for move in moves) / rules.state_bytes_per_s * 1e6
    if saved_us < rules.margin * begin[0] or saved_us * rules.horizon_steps <= state_us + rules.migration_us:
        return ()
    return moves


def transfer_delay(shares: Sequence[DeviceShare], rules: AssistantRules, assignment: Sequence[int]) -> float:
    """Factor on the planned time of transfers with which the predicted step equals the measured one.

    At least 1, which it also is where no transfer decides how long a step takes.
    """
    slowdown = [share.slowdown for share in shares]
    measured_us = max(share.step_us for share in shares)
    low, high = 1.0, MAX_DELAY
    longest_us = predicted_step_us(rules, assignment, slowdown, high)
    if longest_us <= predicted_step_us(rules, assignment, slowdown):
        return 1.0
    while high - low > 0.1 * low:
        middle = (low + high) / 2.0
        if predicted_step_us(rules, assignment, slowdown, middle) < measured_us:
            low = middle
        else:
            high = middle
    return low


def predicted_step_us(
    rules: AssistantRules, assignment: Sequence[int], slowdown: Sequence[float], delay: float = 1.0
) -> float:
    """When the last op ends, each as much slower as its device is, in the order of `order_of`.

    Flows take `delay` times as long.
    """
    return _listed(rules, assignment, slowdown, delay)[1]


def order_of(
    rules: AssistantRules, assignment: Sequence[int], slowdown: Sequence[float], delay: float = 1.0
) -> tuple[int, ...]:
    """The order in which devices run their ops: of those that are ready, the one with the most work behind it."""
    return _listed(rules, assignment, slowdown, delay)[0]


def _listed(
    rules: AssistantRules, assignment: Sequence[int], slowdown: Sequence[float], delay: float
) -> tuple[tuple[int, ...], float]:
    """List scheduling on given devices: an order of all ops, and when the last one ends."""
    waiting = [len(sources) for sources in rules.incoming]
    ready_us = [0.0] * len(rules.ops)
    idle_us = [0.0] * len(rules.devices)
    # For each device the ops that are there, and those that are on their way, by the time of their arrival.
    here: list[list[tuple[float, int]]] = [[] for _ in rules.devices]
    coming: list[list[tuple[float, int]]] = [[] for _ in rules.devices]
    for position, count in enumerate(waiting):
        if not count:
            heappush(coming[assignment[position]], (0.0, position))
    order: list[int] = []
    while len(order) < len(rules.ops):
        able = [
            (max(idle_us[d], 0.0 if here[d] else coming[d][0][0]), d)
            for d in range(len(rules.devices))
            if here[d] or coming[d]
        ]
        now_us, device = min(able)
        while coming[device] and coming[device][0][0] <= now_us:
            position = heappop(coming[device])[1]
            heappush(here[device], (-rules.ranks_us[position], position))
        position = heappop(here[device])[1]
        end_us = idle_us[device] = now_us + rules.ops[position].takes_us[device] * slowdown[device]
        order.append(position)
        for reader, transfer_us in rules.outgoing[position]:
            arrives_us = end_us + (transfer_us * delay if assignment[reader] != device else 0.0)
            ready_us[reader] = max(ready_us[reader], arrives_us)
            waiting[reader] -= 1
            if not waiting[reader]:
                heappush(coming[assignment[reader]], (ready_us[reader], reader))
    return tuple(order), max(idle_us)


def predicted_loads_us(
    rules: AssistantRules, assignment: Sequence[int], slowdown: Sequence[float]
) -> tuple[float, ...]:
    """For each device the time of its ops, as much slower as it is."""
    found = [0.0] * len(rules.devices)
    for op, at in zip(rules.ops, assignment, strict=True):
        found[at] += op.takes_us[at] * slowdown[at]
    return tuple(found)


def shares_of(
    timeline: Timeline, rules: AssistantRules, *, activity: Mapping[str, float] | None = None, steps: int = 1_000_000
) -> tuple[DeviceShare, ...]:
    """Return the share of each device from a measured step, or the median of several, by the names of their lanes.

    `activity` is the use of a device by all programs, as its system reports it, by default the use by this step.
    `steps` have been made since the last moves.
    """
    planned = {op.name: op for op in rules.ops}
    found = []
    for number, device in enumerate(rules.devices):
        spans = [span for span in timeline.spans if span.lane == device]
        took_us = dict.fromkeys(RESOURCES, 0.0)
        for span in spans:
            took_us[planned[span.op].resource] += span.duration_us
        expected_us = sum(planned[span.op].takes_us[number] for span in spans)
        whole_us = max(timeline.makespan_us, 1e-300)
        busy = sum(took_us.values()) / whole_us
        used = busy if activity is None else max(busy, activity.get(device, 0.0))
        found.append(
            DeviceShare(
                compute=min(1.0, used),
                memory=min(1.0, took_us["memory"] / whole_us),
                network=min(1.0, took_us["network"] / whole_us),
                slowdown=sum(took_us.values()) / expected_us if expected_us else 1.0,
                steps=steps,
                step_us=timeline.makespan_us,
            )
        )
    return tuple(found)


def _judged(
    rules: AssistantRules, assignment: Sequence[int], slowdown: Sequence[float], delay: float
) -> tuple[float, float]:
    step_us = predicted_step_us(rules, assignment, slowdown, delay)
    return step_us, max(predicted_loads_us(rules, assignment, slowdown))


def _best_move(
    shares: Sequence[DeviceShare],
    rules: AssistantRules,
    now: list[int],
    delay: float,
    most_load_us: float,
    moved: set[int],
) -> tuple[tuple[float, float], tuple[OpMove, ...]] | None:
    """The unit whose move makes the predicted step shortest, of those that leave no device more loaded than that."""
    slowdown = [share.slowdown for share in shares]
    loads_us = predicted_loads_us(rules, now, slowdown)
    found: tuple[tuple[float, float], tuple[OpMove, ...]] | None = None
    for resource in RESOURCES:
        for giver in (device for device, share in enumerate(shares) if share.of(resource) > rules.theta):
            takers = [d for d, share in enumerate(shares) if d != giver and share.of(resource) <= rules.theta]
            takers.sort(key=lambda device: (shares[device].of(resource) >= rules.gamma, loads_us[device], device))
            able = [unit for unit in _units_at(rules, now, giver, resource) if rules.unit_of[unit[0]] not in moved]
            # An op that takes longer than the giver's excess would only exchange the two devices.
            excess_us = (loads_us[giver] - min(loads_us)) or 1.0
            able.sort(key=lambda unit: (-_part(rules, unit, giver, slowdown, excess_us), unit[0]))
            for unit in able[:CANDIDATES]:
                for taker in takers[:TAKERS]:
                    for position in unit:
                        now[position] = taker
                    judged = _judged(rules, now, slowdown, delay)
                    for position in unit:
                        now[position] = giver
                    if judged[1] <= most_load_us * (1 + ROUNDING) and (found is None or judged < found[0]):
                        found = (judged, tuple(OpMove(position, giver, taker) for position in unit))
    return found


def _units_at(rules: AssistantRules, now: Sequence[int], device: int, resource: Resource) -> list[tuple[int, ...]]:
    """Positions of each unit that may move from a device, if its longest op there is bound by a resource."""
    units: dict[int, list[int]] = {}
    for position, unit in enumerate(rules.unit_of):
        if now[position] == device:
            units.setdefault(unit, []).append(position)
    found = []
    for positions in units.values():
        longest = max(positions, key=lambda position: rules.ops[position].takes_us[device])
        if rules.ops[longest].resource == resource and all(rules.ops[position].is_movable for position in positions):
            found.append(tuple(positions))
    return found


def _part(
    rules: AssistantRules, unit: Sequence[int], device: int, slowdown: Sequence[float], excess_us: float
) -> float:
    """Return the part of the excess that a unit takes. More than all of it counts as nothing."""
    part = sum(rules.ops[position].takes_us[device] for position in unit) * slowdown[device] / excess_us
    return part if part <= 1.0 else 0.0
