"""torch.profiler sees a planned step: a mark for the step, one for each op with its layer, and all lanes' kernels."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

import hocket
from support.steps import update


def test_a_profile_shows_steps_ops_and_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, F.mse_loss(model(batch), torch.zeros(len(batch), 4)))

    batch = torch.randn(4, 8)
    with hocket.schedule(step, model, optimizer, guard=False, cache=False, planner="serial") as fast:
        while not fast.decided:
            fast(batch)
        for _ in range(4):
            fast(batch)
        with torch.profiler.profile(acc_events=True) as profile:
            for _ in range(3):
                fast(batch)
        names = Counter(event.name for event in profile.events())
        assert names["hocket step"] == 3
        marks = {op: sum(op in name and "(2)" in name for name in names) for op in ("addmm", "mm")}
        assert all(marks.values()), sorted(names)
        assert {f"hocket: {op.name} ({op.layer})" for op in fast.graph.ops if op.layer} <= names.keys()
        assert names["aten::addmm"] == 3 * 2


def test_a_profile_shows_the_kernels_of_all_lanes() -> None:
    torch.manual_seed(0)
    towers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def step(batch: torch.Tensor) -> torch.Tensor:
        for tower in towers:
            tower.zero_grad()
        loss = towers[0](batch).square().sum() + towers[1](batch).square().sum()
        loss.backward()
        return loss

    batch = torch.randn(256, 64)
    machine = hocket.Machine.of(cores=2)
    options = {"guard": False, "cache": False, "planner": "concurrency", "machine": machine}
    with hocket.schedule(step, towers, [], numerics="rounding", **options) as fast:
        while not fast.decided:
            fast(batch)
        for _ in range(4):
            fast(batch)
        with torch.profiler.profile(acc_events=True) as profile:
            fast(batch)
        events = [event for event in profile.events() if event.name.startswith("hocket: ")]
        num_workers = sum(bool(lane.ops) for lane in fast.plan.lanes)
        assert len({event.name for event in events} - {"hocket: views of inputs"}) == len(fast.graph.ops)
        assert num_workers == 1 or len({event.thread for event in events}) > 1
