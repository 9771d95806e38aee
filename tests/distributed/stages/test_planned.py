"""Whatever `hocket partition` plans, ranks can run: from captured steps of any kind, without processes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from distributed.stages.trained import Work
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import Borders, check_runs
from hocket.ir import Costs, Graph, Machine, Plan
from hocket.planning.partition import equal_devices, partitioned, plan_of, problem_of
from hocket.tracing import capture
from support.refusals import refused

WIDTH = 8
BLOCKS = ("linear", "dropout", "norm", "in place", "tied", "attention", "strided")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters),
}


class Net(nn.Module):
    """Blocks in a row, each of which makes ops that have to share a rank for another reason."""

    def __init__(self, blocks) -> None:
        super().__init__()
        self.kinds = blocks
        self.blocks = nn.ModuleList(self._block(kind) for kind in blocks)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def _block(self, kind):
        return {
            "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            "dropout": lambda: nn.Dropout(0.25),
            "norm": lambda: nn.BatchNorm1d(WIDTH),
            "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
            "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True),
        }.get(kind, nn.Identity)()

    def forward(self, x):
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind == "tied":
                x = x + self.shared(x)
            elif kind == "strided":
                x = 2 * torch.tanh(x.t()).t()
                x += 1.0
            elif kind == "attention":
                x = block(x[None])[0]
            else:
                x = block(x)
        return self.last(x)


def work_of(blocks, optimizer: str, clip: bool) -> Work:
    torch.manual_seed(3)
    model = Net(blocks)
    optim = OPTIMIZERS[optimizer](model.parameters())

    def step(x):
        optim.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        return loss

    return Work(model, optim, step, [torch.randn(4, WIDTH)])


def planned(graph: Graph, devices: int, objective: str, seed: int) -> Plan:
    """As the verb plans, with made-up costs; few cycles of the search."""
    machine = equal_devices(Machine.of(cores=1), devices)
    costs = Costs({op.name: {"1": 5.0 + at % 7} for at, op in enumerate(graph.ops)})
    problem = problem_of(graph, costs, machine)
    epsilon = None if objective == "time" else 0.9
    found = partitioned(problem, objective=objective, epsilon=epsilon, two_sided=False, rounds=2, seed=seed)
    return plan_of(found, machine)


@settings(max_examples=5)
@given(
    blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip=st.booleans(),
    devices=st.integers(2, 3),
    objective=st.sampled_from(["cut", "load", "time"]),
    seed=st.integers(0, 3),
)
def test_what_is_planned_can_run(tmp_path_factory, blocks, optimizer, clip, devices, objective, seed):
    work = work_of(blocks, optimizer, clip)
    graph = Borders(capture(work.step, work.model, work.optimizer, work.batches[0])).graph
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    graph.save(path)
    plan = planned(Graph.load(path), devices, objective, seed)
    check_runs(captured_for(work.step, work.model, work.optimizer, work.batches[0]), plan)


@pytest.mark.parametrize(
    ("blocks", "lacks", "named"),
    [
        (["dropout", "linear", "dropout"], "buffers", "'random generator' is written, and has one home"),
        (["linear"], "together", "step' is counted on"),
    ],
)
def test_a_graph_that_does_not_say_what_is_together_is_planned_and_refused(blocks, lacks, named):
    work = work_of(blocks, "adam", False)
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    graph = Borders(captured).graph
    assert len(graph.together) == 2 * sum(1 for name, _ in work.model.named_parameters() if "shared" not in name)
    plan = planned(replace(graph, **{lacks: ()}), 3, "load", 0)
    refused(named, check_runs, captured, plan)
