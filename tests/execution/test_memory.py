"""When the memory of a value goes back: after its last reader, whatever the lanes, and never before."""

import gc
import random
import threading
import weakref

import pytest
import torch

from equivalence.compare import assert_same, everything, serial
from equivalence.test_lanes import JOBS, captured_twins
from execution.probe import KINDS
from hocket.execution.base import releases, synchronisation
from hocket.execution.native import NativeLanes
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.native import available, load
from hocket.tracing.captured import Captured, Frame
from quick import covering
from support.random_plans import on_lanes, random_order


class Watched(list):
    """The slots of a step, which note who reads, fills and frees them."""

    def __init__(self, values):
        super().__init__(values)
        self.events = []
        self.guard = threading.Lock()

    def __getitem__(self, slot):
        value = super().__getitem__(slot)
        with self.guard:
            self.events.append(("read", slot))
        return value

    def __setitem__(self, slot, value):
        with self.guard:
            self.events.append(("free" if value is None else "fill", slot))
        super().__setitem__(slot, value)

    def filled(self) -> set[int]:
        return {slot for slot, value in enumerate(super().__iter__()) if value is not None}


def plans(captured: Captured, name: str) -> list[Plan]:
    chance = random.Random(name)
    several = [on_lanes(random_order(captured.graph, chance), lanes, chance) for lanes in (1, 2, 3)]
    return [serial(captured), *several]


def watch(captured: Captured, plan: Plan, batch) -> Watched:
    frame = captured.begin(batch)
    watched = Watched(frame.values)
    lanes = ThreadLanes(captured, plan)
    lanes.run(Frame(watched, frame.numbers))
    lanes.close()
    captured.finish(Frame(list(watched), frame.numbers))
    return watched


@pytest.mark.parametrize("name", JOBS)
def test_every_value_is_freed_once_and_after_its_last_reader(name):
    pair, _, captured = captured_twins(JOBS[name], True)
    program = captured.program
    read = program.readers()
    made = {slot for action in program.actions for slot in action.fills} - program.kept
    made |= {slot for slot in program.prologue.fills if slot in read} - program.kept  # views of inputs
    for number, plan in enumerate(plans(captured, name)):
        watched = watch(captured, plan, pair.planned.batch(number))
        freed: dict[int, int] = {}
        for at, (what, slot) in enumerate(watched.events):
            if what == "free":
                assert slot not in freed, f"slot {slot} is freed twice"
                freed[slot] = at
            elif what == "read":
                assert slot not in freed, f"slot {slot} is read after it was freed"
        assert set(freed) == made
        assert watched.filled() & made == set()
        assert program.kept & set(program.by_name[plan.lanes[0].ops[0]].fills) <= watched.filled()


@pytest.mark.parametrize(("lanes", "kind"), covering([1, 2], KINDS))
def test_steps_leave_nothing_behind(kind, lanes, own_objects, started):
    pair, _, captured = captured_twins(JOBS["small net"], True)
    chance = random.Random(lanes)
    plan = on_lanes(random_order(captured.graph, chance), lanes, chance)
    planned = started(captured, plan, kind=kind)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    planned(pair.planned.batch(0))
    before = tensors()
    for number in range(5):
        planned(pair.planned.batch(number))
    assert tensors() == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_returns_and_its_batch_belong_to_the_caller_alone(kind, started):
    pair, _, captured = captured_twins(JOBS["small net"], True)
    planned = started(captured, Plan((Lane("x", captured.graph.order, width=7),)), kind=kind)
    batch = tuple(tensor.clone() for tensor in pair.planned.batch(1))
    result = planned(batch)
    gone = [weakref.ref(thing) for thing in (result, *batch)]
    del result, batch
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_a_step_that_fails_leaves_nothing_behind(started):
    pair, first, captured = captured_twins(JOBS["transformer"], False)
    planned = started(captured, Plan((Lane("x", captured.graph.order, width=7),)), kind="python")
    tokens = torch.full_like(pair.planned.batch(0)[0], 10_000)
    broken = (tokens, *pair.planned.batch(0)[1:])
    gone = weakref.ref(tokens)
    with pytest.raises(IndexError):
        planned(broken)
    del broken, tokens
    gc.collect()
    assert gone() is None
    torch.manual_seed(7)
    serial_lanes = ThreadLanes(first, serial(first))
    serial_lanes(pair.eager.batch(1))
    torch.manual_seed(7)
    planned(pair.planned.batch(1))
    assert_same(everything(pair.eager), everything(pair.planned), tolerance=1e-5)


@pytest.mark.skipif(not available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("lanes", [1, 2])
def test_native_lanes_find_the_memory_of_the_step_before(lanes, started):
    pair, _, captured = captured_twins(JOBS["dcgan"], True)
    chance = random.Random(lanes)
    plan = serial(captured) if lanes == 1 else on_lanes(random_order(captured.graph, chance), lanes, chance)
    planned = started(captured, plan, kind="native")
    for number in range(4):
        planned(pair.planned.batch(number))
    kept = load().kept_bytes()
    assert kept > 0
    for number in range(8):
        planned(pair.planned.batch(number))
    # On one lane every block is asked for in the same order; lanes side by side may want one more at a time.
    assert load().kept_bytes() - kept <= (0 if lanes == 1 else kept // 4)


@pytest.mark.skipif(not available(), reason="needs a C++ compiler")
def test_what_a_step_leaves_behind_outlives_the_lanes_that_made_it():
    pair, _, captured = captured_twins(JOBS["dcgan"], False)
    planned = NativeLanes(captured, serial(captured))
    planned(pair.planned.batch(0))
    gradients = [parameter.grad for parameter in pair.planned.models[0].parameters()]
    before = [gradient.clone() for gradient in gradients]
    planned.close()
    del planned
    gc.collect()
    again = NativeLanes(captured, serial(captured))
    again(pair.planned.batch(1))
    for gradient, value in zip(gradients, before, strict=True):
        assert torch.equal(gradient, value)
    again.close()


def test_on_one_lane_a_value_is_freed_by_the_very_op_that_reads_it_last():
    pair, _, captured = captured_twins(JOBS["small net"], False)
    frame = captured.begin(pair.planned.batch(1))
    readers = captured.program.readers()
    order = captured.graph.order
    release = releases(captured.program, synchronisation(captured.graph, serial(captured)))
    assert not release.shared, "on one lane somebody is always the last"
    for name, slots in release.frees.items():
        for slot in slots:
            users = [*readers.get(slot, ()), *(a.name for a in captured.program.actions if slot in a.fills)]
            assert name == max(users, key=order.index)
    assert frame is not None
