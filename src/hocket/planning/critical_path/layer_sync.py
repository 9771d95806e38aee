r"""Layer by layer: the tasks of one layer side by side, and a barrier before the next one.

This is the schedule of Caffe with cuDNN, the baseline of TurboDL (section 4): a layer's gradients run on separate
streams, but the next layer starts only when all of them are done (Fig. 3a)::

    activation   [ dA3 ]    |[ dA2     ]|[ dA1 ]
    weight       [ dW3     ]|[ dW2 ]    |[ dW1    ]|[ updates ]
    bias         [dB3]      |[dB2]      |[dB1]

A layer's ops are neighbours in program order that belong to one module. Updates follow the backward one by one.
"""

from __future__ import annotations

from hocket.ir import Graph, Lane, Plan
from hocket.planning.critical_path.streams import TASKS, Streams


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
