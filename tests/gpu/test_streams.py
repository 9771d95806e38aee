"""On a real device: planned steps on streams and as a graph are eager's steps."""

import copy
import random
from functools import partial

import pytest
import torch

from equivalence.compare import assert_same, everything, named_leaves, twins
from hocket.execution.streams import CudaDevice, GraphedLanes, StreamLanes
from hocket.ir import Costs, Machine
from hocket.planning import plan
from hocket.planning.critical_path import METHODS
from hocket.tracing import capture
from hocket.tracing.capturing import capture_step
from hocket.zoo import load
from support.random_plans import on_lanes, on_streams, random_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled"),  # cuBLAS without its variable
]


@pytest.fixture(autouse=True)
def _deterministic():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


NAMES = ["lenet", "mlp", "lstm-cells", "transformer", "dcgan", "digits-cnn"]  # that need no further package


@pytest.mark.parametrize("make", [StreamLanes, GraphedLanes])
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_streams_are_eagers_steps(name, make):
    pair = twins(lambda: load(name, device="cuda"))
    for job in pair.both():
        torch.manual_seed(1)
        job.step(job.batch(0))
    captured = capture(pair.planned.step, pair.planned.model, pair.planned.optimizer, pair.planned.batch(0))
    chance = random.Random(name)
    planned = make(captured, on_streams(on_lanes(random_order(captured.graph, chance), 3, chance)))
    for number in range(6):
        torch.manual_seed(number)
        expected = pair.eager.step(pair.eager.batch(number))
        torch.manual_seed(number)
        found = planned(pair.planned.batch(number))
        where = f"step {number}"
        assert_same(named_leaves("returned", expected), named_leaves("returned", found), where, 1e-4)
        assert_same(everything(pair.eager), everything(pair.planned), where, 1e-4)
    planned.close()


@pytest.mark.parametrize("make", [partial(StreamLanes, timed=True), GraphedLanes])
def test_a_timeline_keeps_the_orders_and_changes_nothing(make):
    job = load("lenet", device="cuda")
    job.step(job.batch(0))
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    chance = random.Random(0)
    planned = make(captured, on_streams(on_lanes(random_order(captured.graph, chance), 3, chance)))
    for number in range(4):
        planned(job.batch(number))
    torch.cuda.synchronize()
    before = copy.deepcopy(list(everything(job)))
    timeline = planned.timeline()
    assert_same(before, everything(job))
    spans = timeline.by_op
    assert spans.keys() == set(captured.graph.order)
    assert timeline.makespan_us > 0
    for edge in captured.graph.edges:
        # An event's time stamp is good for half a microsecond.
        assert spans[edge.src].end_us <= spans[edge.dst].start_us + 1
    planned.close()


def test_a_capture_that_fails_leaves_draws_allocations_and_streams_as_they_were():
    device = CudaDevice()

    def work():
        torch.rand(8, device="cuda").sum().item()  # no value can be read in a capture

    stream = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            device.graph(work)
        assert torch.cuda.current_stream() == stream
        torch.cuda.manual_seed(1)
        first = torch.rand(8, device="cuda")
        torch.cuda.manual_seed(1)
        assert torch.equal(first, torch.rand(8, device="cuda"))
    x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    replay = device.graph(lambda: y.add_(x))
    assert not y.any(), "a capture runs nothing"
    replay()
    replay()
    assert torch.equal(y, x + x)


@pytest.mark.parametrize("name", ["lenet", "digits-cnn"])
def test_loss_curves_agree_over_200_steps(name):
    """As closely as two runs of the one-stream graph do, where these are not deterministic."""
    curves: dict[str, list[float]] = {}
    for label, methods in (("graph", ()), ("graph again", ()), ("planned", METHODS)):
        torch.manual_seed(0)
        job = load(name, device="cuda", num_batches=7)
        job.step(job.batch(0))
        captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
        chance = random.Random(name)
        costs = Costs({op.name: {"gpu0": chance.uniform(1, 50)} for op in captured.graph.ops})
        made = plan(captured.graph, costs, Machine.preset("a100"), planner="critical-path", methods=methods)
        assert (len(made.lanes) > 1) == bool(methods)
        step = GraphedLanes(captured, made)
        torch.manual_seed(1)
        curves[label] = [step(job.batch(number)).item() for number in range(1, 201)]
        step.close()
    spread = max(abs(a - b) / abs(a) for a, b in zip(curves["graph"], curves["graph again"], strict=True))
    apart = max(abs(a - b) / abs(a) for a, b in zip(curves["graph"], curves["planned"], strict=True))
    assert apart <= max(2 * spread, 1e-4), f"{apart:.1e}, and two runs of the graph differ by {spread:.1e}"
