"""A plan for a GPU's streams, run on CPU lanes, one lane a stream: the bits of the serial plan, and its memory.

And two hundred steps of it have the losses of eager.
"""

import random
import threading
from dataclasses import replace

import pytest
import torch

from equivalence.compare import assert_same, everything, named_leaves, serial, twins
from equivalence.test_lanes import CASES, JOBS, cached_twins, captured_twins
from execution.probe import KINDS
from hocket.checking import check, hazards
from hocket.execution import executor
from hocket.execution.threads import ThreadLanes
from hocket.ir import Costs, Lane, Machine, Plan
from hocket.planning import plan
from hocket.planning.critical_path.streams import METHODS
from hocket.tracing.captured import Captured, Frame
from hocket.tracing.capturing import capture_step
from hocket.zoo import load
from quick import covering, some

pytestmark = pytest.mark.usefixtures("one_thread")


def on_cores(captured: Captured, **options) -> Plan:
    """The plan that a P100 would get, with a thread in place of each stream."""
    chance = random.Random(str(options))
    costs = Costs({op.name: {"gpu0": chance.uniform(1, 50)} for op in captured.graph.ops})
    made = plan(captured.graph, costs, Machine.preset("p100"), planner="critical-path", **options)
    hazards(captured.graph, made)
    lanes = tuple(replace(lane, kind="cores", device="cpu0", priority=0) for lane in made.lanes)
    found = replace(made, lanes=lanes)
    check(captured.graph, found)
    return found


@pytest.mark.parametrize(("name", "split", "kind"), covering(CASES, KINDS))
def test_streams_as_threads_compute_what_the_serial_plan_computes(name, split, kind):
    pair, first, second = cached_twins(name, split)
    plain = executor(first, Plan((Lane("main", first.graph.order),)), kind="python")
    for number, levels in enumerate(METHODS):
        planned = executor(second, on_cores(second, levels=levels), kind=kind)
        torch.manual_seed(number)
        expected = plain(pair.eager.batch(number))
        torch.manual_seed(number)
        found = planned(pair.planned.batch(number))
        assert_same(named_leaves("returned", expected), named_leaves("returned", found))
        assert_same(everything(pair.eager), everything(pair.planned))
        planned.close()


# Bytes of what is read at the step's beginning although no op touches it.
UNTOUCHED = 64


class Counted(list):
    """The slots of a step, and the most bytes that their tensors held at once."""

    def __init__(self, values):
        super().__init__(values)
        self.guard = threading.Lock()
        self.users: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.peak_bytes = 0
        for value in values:
            self._count(value, 1)

    def __setitem__(self, slot, value):
        with self.guard:
            before = super().__getitem__(slot)
            super().__setitem__(slot, value)
            self._count(value, 1)
            self._count(before, -1)

    def _count(self, value, by: int) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            self.users[key] = self.users.get(key, 0) + by
            self.bytes[key] = storage.nbytes()
            if not self.users[key]:
                del self.users[key], self.bytes[key]
            self.peak_bytes = max(self.peak_bytes, sum(self.bytes.values()))


def measured_bytes(captured: Captured, made: Plan, batch) -> int:
    frame = captured.begin(batch)
    counted = Counted(frame.values)
    lanes = ThreadLanes(captured, made)
    lanes.run(Frame(counted, frame.numbers))
    lanes.close()
    captured.finish(Frame(list(counted), frame.numbers))
    return counted.peak_bytes


@pytest.mark.parametrize(("name", "ratio"), covering(JOBS, [1.0, 1.1, 2.0]))
def test_measured_peaks_are_within_the_predicted_ones_and_these_within_the_limit(name, ratio):
    pair, _, captured = captured_twins(JOBS[name], True)
    free = on_cores(captured, peak_limit_bytes=1e12)
    limit = ratio * free.eager_peak_bytes * 1.002
    made = on_cores(captured, peak_limit_bytes=limit)
    assert made.peak_bytes <= limit + 1
    for number in range(3):
        assert measured_bytes(captured, made, pair.planned.batch(number)) <= made.peak_bytes + UNTOUCHED
        assert measured_bytes(captured, free, pair.planned.batch(number)) <= free.peak_bytes + UNTOUCHED
    eager = measured_bytes(captured, serial(captured), pair.planned.batch(3))
    assert 0.98 * free.eager_peak_bytes <= eager <= free.eager_peak_bytes + UNTOUCHED


STEPS = 200
LARGER = ("lenet", "digits-cnn", "transformer")


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)], some(KINDS[::-1])),
)
def test_loss_curves_agree(name, kind):
    # Seven batches, so that a later one is not always seen after the same one before it.
    pair = twins(lambda: load(name, batch_size=8, num_batches=7), scheduler=lambda optimizer: None)
    for job in pair.both():
        torch.manual_seed(0)
        job.step(job.batch(0))
    captured = capture_step(pair.planned.step, pair.planned.model, pair.planned.optimizer, pair.planned.batch(0))
    made = on_cores(captured)
    assert len(made.lanes) > 1
    planned = executor(captured, made, kind=kind)
    curves: dict[str, list[float]] = {"eager": [], "planned": []}
    for number in range(1, STEPS + 1):
        for label, step, job in (("eager", pair.eager.step, pair.eager), ("planned", planned, pair.planned)):
            torch.manual_seed(number)
            curves[label].append(step(job.batch(number)).item())
    planned.close()
    assert curves["planned"] == curves["eager"]
    assert_same(everything(pair.eager), everything(pair.planned))
    first, last = sum(curves["eager"][:14]), sum(curves["eager"][-14:])
    assert last < 0.9 * first, "nothing was learnt, so there was little to compare"
