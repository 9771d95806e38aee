r"""Streams: one for each parallel layer path and each task of a layer, and at most eight.

Algorithm 1 of TurboDL gives each layer path one path of execution for each task of its layers, and each of these a
stream. Blocks run one after the other, so they use the same streams: a chain such as VGG-16 needs three at any depth,
where Caffe with cuDNN makes 38 (section 4.3)::

    activation 0   [ conv1 ][ conv2 ]  ... [ dA2 ][ dRelu1 ]                       priority 1
    weight 0                                      [ dW2 ][ u2 ][ dW1 ][ u1 ]                0
    bias 0                                        [ dB2 ][ v2 ] [ dB1 ][ v1 ]              -1

Priorities have two levels: the rank of a layer path in its block, and the task. An activation gradient has the priority
of its path, a weight gradient one that is lower by the number of paths (alpha), a bias gradient one lower still (beta).
Every gradient of a parameter therefore yields to every activation gradient. With two layer paths::

    priority   2    activation gradients of the critical path, and all that lies outside of blocks
               1    activation gradients of the other path
               0    weight gradients of the critical path
              -1    weight gradients of the other path, bias gradients of the critical path
              -2    bias gradients of the other path

If eight are not enough, each task keeps at least one stream, and activation gradients get the most. Paths of higher
rank share the last stream of their task. So do paths that take less than a thousandth of the backbone, such as the
draw of a dropout mask, since a separate stream would gain less than that.

All lanes keep one order of the whole step, so they never wait for each other in a circle. In it the backbone has its
program order, and each other op comes right after the last op of the backbone that it depends on: a weight gradient
after the activation gradient that it reads, and an update after its gradient, not after the whole backward. So a stream
of weight gradients runs them in the order in which they become ready, and frees activations in that order.

Layer by layer: the tasks of one layer side by side, and a barrier before the next one.

This is the schedule of Caffe with cuDNN, the baseline of TurboDL (section 4): a layer's gradients run on separate
streams, but the next layer starts only when all of them are done (Fig. 3a)::

    activation   [ dA3 ]    |[ dA2     ]|[ dA1 ]
    weight       [ dW3     ]|[ dW2 ]    |[ dW1    ]|[ updates ]
    bias         [dB3]      |[dB2]      |[dB1]

A layer's ops are neighbours in program order that belong to one module. Updates follow the backward one by one.

Stream plans for GPUs with fewer priority levels than a step needs.

A P100 has two levels. TurboDL (section 3.3) needs one for each layer path and each task, and proposes:

1. *Order*: paths that share a level share a queue, whose order replaces the missing levels::

       level 1   [ critical dA ][ critical dA ][ dA of the other path ][ ... ]        one stream in place of two

2. *Waits*: they keep their streams, and an added wait delays the less critical path until the more critical one has
   begun::

       level 1   [ critical dA ][ critical dA ]
                       `-------> [ dA of the other path ]                            two streams, one event more

Both have a cost, as the paper says. So there are two more: *plain*, where paths share a level without further measures,
and *flat*, one level for all streams, for steps whose parameter gradients are the bottleneck. The shortest depends on
the durations, so `hocket.planning.critical_path` simulates all of them and takes the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hocket.ir import Graph, Lane, Plan, list_order
from hocket.planning.critical_path.backbone import Backbone, Block, Path, backbone_of, blocks_of, in_ns, ranked_paths

MAX_STREAMS = 8

# Purpose of a stream of a layer path: activation gradients (and forwards), weight gradients, bias gradients.
TASKS = ("activation", "weight", "bias")

# Share of the backbone's time below which a layer path gets no separate stream.
LEAST_PATH = 1e-3

Stream = tuple[str, int]


@dataclass(frozen=True)
class Streams:
    """The stream of each op."""

    order: tuple[str, ...]  # all ops but transfers, in the order that every lane keeps
    # op -> its task (one of `TASKS`) and the rank of the layer path whose stream it takes
    stream_of: Mapping[str, Stream]
    backbone: Backbone  # the ops that other ops of the step wait for
    # the backbone's blocks, each with its layer paths, the critical one first
    blocks: tuple[tuple[Block, tuple[Path, ...]], ...]
    updates_last: bool = False  # the argument of `step_order` that made the order

    @property
    def num_paths(self) -> int:
        """The most layer paths of a block."""
        return max([len(paths) for _, paths in self.blocks], default=1)

    def priority(self, stream: Stream) -> int:
        """The priority of a stream. Higher runs first."""
        task, rank = stream
        path = self.num_paths - min(rank, self.num_paths - 1)
        return path - {"activation": 0, "weight": self.num_paths, "bias": self.num_paths + 1}[task]

    def lanes(self) -> dict[Stream, list[str]]:
        """The ops of each stream in order: activation gradients first, the critical path first."""
        found: dict[Stream, list[str]] = {}
        for op in self.order:
            found.setdefault(self.stream_of[op], []).append(op)
        return {stream: found[stream] for stream in sorted(found, key=lambda s: (TASKS.index(s[0]), s[1]))}


def streams_of(
    graph: Graph, durations_us: Mapping[str, float], max_streams: int = MAX_STREAMS, *, updates_last: bool = False
) -> Streams:
    """Rank the layer paths, and give every op a stream.

    `durations_us` has the ops of the backbone. `updates_last` is as for `step_order`.
    """
    backbone = backbone_of(graph)
    weights = in_ns([durations_us[op] for op in backbone.ops])
    blocks = tuple((block, tuple(ranked_paths(backbone, block, weights))) for block in blocks_of(backbone))
    rank = dict.fromkeys(backbone.ops, 0)
    least = LEAST_PATH * sum(weights)
    for _, paths in blocks:
        wide = sum(sum(weights[op] for op in path.ops) >= least for path in paths)
        for number, path in enumerate(paths):
            for op in path.ops:
                rank[backbone.ops[op]] = min(number, max(wide - 1, 0))
    tasks = _tasks(graph, rank)
    if max_streams < len(TASKS):  # one for all ops, or one for the backbone and one for the others
        side = "weight" if max_streams == 2 else "activation"
        tasks = {op: (task if task == "activation" else side, number) for op, (task, number) in tasks.items()}
    width = _widths({task: {r for t, r in tasks.values() if t == task} for task in TASKS}, max_streams)
    stream_of = {name: (task, min(number, width[task] - 1)) for name, (task, number) in tasks.items()}
    order = step_order(graph, backbone.ops, updates_last=updates_last)
    return Streams(order, stream_of, backbone, blocks, updates_last)


def step_order(graph: Graph, backbone: Sequence[str], *, updates_last: bool = False) -> tuple[str, ...]:
    """All ops but transfers: the backbone in the given order, and each other op after those of it that it depends on.

    The backbone is in any order that respects the edges. With `updates_last` updates come after all other ops, in
    program order.
    """
    inside = set(backbone)
    rest = [op for op in graph.order if op not in inside and graph[op].role not in ("send", "recv")]
    place = {op: at for at, op in enumerate((*backbone, *rest))}
    behind: dict[str, int] = {}
    for op in place:
        if op in inside or (updates_last and graph[op].role == "update"):
            behind[op] = place[op]
        else:
            behind[op] = max([behind[other] for other in graph.predecessors[op] if other in behind], default=-1)
    return tuple(sorted(place, key=lambda op: (behind[op], place[op])))


def _tasks(graph: Graph, rank: Mapping[str, int]) -> dict[str, Stream]:
    """For each op its task and the rank of its layer's path."""
    of_layer: dict[str, int] = {}
    for name, number in rank.items():
        if graph[name].role == "activation_grad" and graph[name].layer:
            of_layer.setdefault(graph[name].layer, number)
    found: dict[str, Stream] = {}
    for name in graph.order:
        if graph[name].role in ("send", "recv"):
            continue
        if name in rank:
            found[name] = ("activation", rank[name])
            continue
        role, layer = graph[name].role, graph[name].layer
        before = [other for other in graph.predecessors[name] if other in found]
        if role in ("weight_grad", "bias_grad"):
            number = of_layer[layer] if layer in of_layer else max([found[other][1] for other in before], default=0)
            found[name] = ("bias" if role == "bias_grad" else "weight", number)
        else:  # the stream of the gradient that it waits for
            gradients = [found[other] for other in before if other not in rank and graph.predecessors[other]]
            found[name] = gradients[-1] if gradients else ("weight", 0)
    for name in reversed(graph.order):
        # An update op without predecessors (a momentum that decays) goes to the stream of its successors.
        if name in found and name not in rank and not any(other in found for other in graph.predecessors[name]):
            after = [found[other] for other in graph.successors[name] if other in found and other not in rank]
            found[name] = after[0] if after else found[name]
    return found


def _widths(ranks: Mapping[str, set[int]], max_streams: int) -> dict[str, int]:
    """The number of streams of each task."""
    width = {task: max(ranks[task], default=-1) + 1 for task in TASKS}
    while sum(width.values()) > max_streams:
        # The side task with more streams loses one first, and the activation gradients last.
        wide = [task for task in ("bias", "weight") if width[task] > 1] or ["activation"]
        task = max(wide, key=width.__getitem__)
        if width[task] <= 1:
            break
        width[task] -= 1
    return width


def layer_sync(graph: Graph, streams: Streams, device: str) -> Plan:
    """A plan of up to three streams on a GPU, all of one priority."""
    lanes: dict[str, list[str]] = {task: [] for task in TASKS}
    after: dict[str, tuple[str, ...]] = {}
    before: dict[str, str] = {}  # for each lane the last op of the layer before
    now: dict[str, str] = {}  # and the last one of this layer
    layer: tuple[str, bool] | None = None
    for name in graph.order:
        op = graph[name]
        task, _ = streams.stream_of[name]
        updates = task != "activation" and op.role not in ("weight_grad", "bias_grad")
        if updates:
            task = "activation"
        if layer != (op.layer, updates):
            # The layer in between has waited for the ops of two layers ago.
            before, now = {**before, **now} if not now else dict(now), {}
            layer = (op.layer, updates)
        if task not in now:
            others = tuple(other for lane, other in before.items() if lane != task)
            if others:
                after[name] = others
        lanes[task].append(name)
        now[task] = name
    made = tuple(Lane(f"{device}.{task}", tuple(ops), "stream", device) for task, ops in lanes.items() if ops)
    return Plan(made, after, "critical-path")


METHODS = ("order", "waits", "plain", "flat")


def hardware_levels(wanted: Mapping[Stream, int], num_levels: int) -> dict[Stream, int]:
    """A level of the GPU for each stream, from 0 (lowest) to `num_levels` - 1.

    If there are too few levels, weight and bias gradients share the lowest one, and the other levels go to the most
    critical paths, of which the last ones share a level. With only one level all streams share it.
    """
    distinct = sorted(set(wanted.values()))
    if len(distinct) <= num_levels:
        return {stream: distinct.index(priority) for stream, priority in wanted.items()}
    critical = sorted({priority for (task, _), priority in wanted.items() if task == "activation"}, reverse=True)
    lowest = 1 if num_levels > 1 else 0
    return {
        stream: max(num_levels - 1 - critical.index(priority), lowest) if stream[0] == "activation" else 0
        for stream, priority in wanted.items()
    }


def stream_plan(
    graph: Graph, streams: Streams, device: str, num_levels: int, method: str
) -> tuple[Plan, tuple[str, ...]]:
    """The plan on a GPU, and the order of all ops that its lanes keep.

    The method is one of `METHODS`.
    """
    if method in ("order", "waits"):
        by_rank = step_order(graph, _by_rank(graph, streams), updates_last=streams.updates_last)
        streams = replace(streams, order=by_rank)
    turn = {op: at for at, op in enumerate(streams.order)}
    ops = streams.lanes()
    level = dict.fromkeys(ops, 0)
    if method != "flat":
        level = hardware_levels({stream: streams.priority(stream) for stream in ops}, num_levels)
    queues: dict[Stream, list[Stream]] = {}
    for stream in ops:
        is_shared = method == "order" and stream[0] == "activation"
        able = (other for other in queues if is_shared and other[0] == "activation" and level[other] == level[stream])
        leader = next(able, stream)
        queues.setdefault(leader, []).append(stream)
    lanes = []
    for leader, members in queues.items():
        queue = sorted((op for stream in members for op in ops[stream]), key=turn.__getitem__)
        name = f"{device}.{leader[0]}{leader[1]}"
        lanes.append(Lane(name, tuple(queue), "stream", device, priority=level[leader]))
    after = _added_waits(streams, level, turn) if method == "waits" else {}
    return Plan(tuple(lanes), after), streams.order


def _by_rank(graph: Graph, streams: Streams) -> list[str]:
    """The backbone block by block, and in each block the more critical path first, as far as edges allow."""
    backbone = streams.backbone.ops
    place = {op: at for at, op in enumerate(backbone)}
    turn = {op: (at, 0) for op, at in place.items()}
    for block, paths in streams.blocks:
        for rank, path in enumerate(paths):
            turn.update(dict.fromkeys((backbone[op] for op in path.ops), (block.ops[0], rank)))
    left = {op: sum(before in place for before in graph.predecessors[op]) for op in backbone}
    followers = {op: [after for after in graph.successors[op] if after in place] for op in backbone}
    return list(list_order(left, followers, lambda op: (turn[op], place[op])))


def _added_waits(streams: Streams, level: Mapping[Stream, int], turn: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Waits between paths of a block that share a level: the first op of one waits for that of the next better one."""
    backbone = streams.backbone.ops
    waits: dict[str, tuple[str, ...]] = {}
    for _, paths in streams.blocks:
        for better, worse in pairwise(paths):
            first, late = backbone[better.ops[0]], backbone[worse.ops[0]]
            one, other = streams.stream_of[first], streams.stream_of[late]
            if one != other and level[one] == level[other] and turn[first] < turn[late]:
                waits[late] = (first,)
    return waits
