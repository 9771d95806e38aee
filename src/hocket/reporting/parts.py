"""A picture of a plan over several devices: the ops of each, and the bytes between them.

Each device is a row with its ops in the order of the step, as wide as their duration. Below is a table of the bytes
that each device sends to each other one, once for each tensor and device that reads it. The axis counts durations of
ops one after another, so it has no idle time.
"""

from __future__ import annotations

from collections.abc import Mapping

from hocket.ir import Costs, Graph, Plan
from hocket.reporting.drawing import axis, legend
from hocket.reporting.svg import EDGE_PX, document, escaped, text_at, with_title
from hocket.reporting.words import count_text, duration_text, quantity_text, shorten

_ROW_PX = 26.0
_CELL_PX = 92.0
_NAME_PX = 110.0
# Narrower bars are drawn as one with those beside them of their role.
_LEAST_PX = 0.7


def bytes_between(graph: Graph, plan: Plan) -> dict[tuple[str, str], float]:
    """Map (source, destination) devices to the bytes that are sent in a step, where any are.

    Edges out of one op that carry equally many bytes are one tensor, which is sent to a device once.
    """
    device_of = {op: lane.device for op, lane in plan.lane_of.items()}
    found: dict[tuple[str, str], float] = {}
    seen: set[tuple[str, float, str]] = set()
    for src, dst, size_bytes in graph.edges:
        ends = device_of.get(src), device_of.get(dst)
        if None in ends or ends[0] == ends[1] or not size_bytes or (src, size_bytes, str(ends[1])) in seen:
            continue
        seen.add((src, size_bytes, str(ends[1])))
        pair = (str(ends[0]), str(ends[1]))
        found[pair] = found.get(pair, 0.0) + size_bytes
    return found


def parts_svg(graph: Graph, plan: Plan, costs: Costs, *, title: str = "", width: int = 960) -> str:
    """Draw the ops on each device, and the bytes between devices.

    Channels are left out, and an op without a cost takes no space. The picture is for light and dark backgrounds.
    """
    devices = list(dict.fromkeys(lane.device for lane in plan.lanes if lane.kind != "channel"))
    takes_us = {
        op: costs.duration_us(op, width=lane.width, device=lane.device) if op in costs else 0.0
        for op, lane in plan.lane_of.items()
    }
    parts, y = with_title(title, width)
    whole_us = sum(takes_us.values())
    scale = max(50.0, width - 2 * EDGE_PX - _NAME_PX) / max(whole_us, 1e-12)
    keys, y = legend({graph[op].role for op in takes_us if op in graph.by_name}, y, width)
    parts += keys
    top = y - 4
    for device in devices:
        parts += _row(graph, plan, takes_us, device, y, scale, width)
        y += _ROW_PX + 20
    parts = [*axis(whole_us, scale, EDGE_PX + _NAME_PX, [(top, y)], y), *parts]
    y += 26
    flows = bytes_between(graph, plan)
    parts += _table(devices, flows, y + 12)
    words = [title] if title else []
    words += [f"{src} to {dst}: {quantity_text(size, 'B')}" for (src, dst), size in flows.items()]
    height = y + 48 + _ROW_PX * len(devices)
    wide = max(width, int(2 * EDGE_PX + _NAME_PX + _CELL_PX * len(devices)))
    return document(parts, width=wide, height=height, description="; ".join(words) or "one device")


def _row(
    graph: Graph, plan: Plan, takes_us: Mapping[str, float], device: str, y: float, scale: float, width: int
) -> list[str]:
    left = EDGE_PX + _NAME_PX
    found = [text_at(left - 8, y + 16, shorten(device, 16), "hk-lane")]
    found.append(
        f'<rect class="hk-rest" x="{left:.1f}" y="{y:.1f}" width="{width - EDGE_PX - left:.1f}" height="{_ROW_PX}"/>'
    )
    at_us, ops, load_us = 0.0, 0, 0.0
    pending: tuple[float, float, str, str] | None = None
    for name in graph.order:
        lane = plan.lane_of.get(name)
        end_us = at_us + takes_us.get(name, 0.0)
        if lane is not None and lane.device == device and lane.kind != "channel":
            ops, load_us = ops + 1, load_us + takes_us[name]
            role = graph[name].role
            if pending and pending[2] == role and (at_us - pending[1]) * scale < _LEAST_PX:
                pending = (pending[0], end_us, role, pending[3])
            else:
                found += _bar(pending, left, y, scale)
                pending = (at_us, end_us, role, name)
        at_us = end_us
    found += _bar(pending, left, y, scale)
    found.append(text_at(left, y + _ROW_PX + 12, f"{count_text(ops, 'op')}, {duration_text(load_us)}", "hk-key"))
    return found


def _bar(span: tuple[float, float, str, str] | None, left: float, y: float, scale: float) -> list[str]:
    if span is None:
        return []
    begin_us, end_us, role, name = span
    wide = max(_LEAST_PX, (end_us - begin_us) * scale)
    return [
        f'<rect class="hk-{role}" x="{left + begin_us * scale:.2f}" y="{y:.1f}" width="{wide:.2f}" '
        f'height="{_ROW_PX}"><title>{escaped(name)}</title></rect>'
    ]


def _table(devices: list[str], flows: Mapping[tuple[str, str], float], y: float) -> list[str]:
    left = EDGE_PX + _NAME_PX
    found = [text_at(EDGE_PX, y, "bytes from, to", "hk-head")]
    for column, device in enumerate(devices):
        found.append(text_at(left + _CELL_PX * (column + 0.5), y, shorten(device, 14), "hk-tick"))
    for row, src in enumerate(devices):
        place = y + _ROW_PX * (row + 1)
        found.append(text_at(left - 8, place, shorten(src, 16), "hk-lane"))
        for column, dst in enumerate(devices):
            size = flows.get((src, dst), 0.0)
            words = "" if src == dst else quantity_text(size, "B") if size else "0"
            found.append(text_at(left + _CELL_PX * (column + 0.5), place, words, "hk-tick"))
    return found
