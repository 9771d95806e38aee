"""Many variants of a step: as many shapes as fit into memory, and none is searched that does not come back."""

import json

import pytest
import torch
from torch import nn

import hocket
from execution.probe import KINDS
from hocket.autotune import pool
from hocket.autotune.pool import MAX_EASY, MIN_REPEATS
from hocket.session import Schedule
from support.steps import update

pytestmark = pytest.mark.usefixtures("one_thread")

# Calls until a shape is decided, where only the serial planner is tried and nothing compared.
ENOUGH = 15


def made(**options):
    """A schedule of a small step that takes batches of any size, and its eager twin."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]

    def step_of(number: int):
        def step(batch: torch.Tensor) -> torch.Tensor:
            return update(optimizers[number], models[number](batch).pow(2).mean()).detach()

        return step

    options = {"planner": "serial", "guard": False, "machine": hocket.Machine.of(cores=1), **options}
    return Schedule(step_of(0), models[0], optimizers[0], **options), step_of(1)


class Ticks:
    """A clock that moves on each time it is asked."""

    STEP_S = 0.001

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.STEP_S
        return self._now_s


def batches(size: int, count: int):
    return [torch.randn(size, 4) for _ in range(count)]


def same(fast, eager, size: int, count: int) -> None:
    """Make this number of calls, each with eager's result."""
    for batch in batches(size, count):
        assert torch.equal(fast(batch), eager(batch))


@pytest.fixture
def _searches_cost_nothing(monkeypatch):
    monkeypatch.setattr(pool.VariantPool, "_search_s", 0.0)


@pytest.mark.usefixtures("_searches_cost_nothing")
def test_more_shapes_than_are_searched_at_once_are_all_planned():
    fast, eager = made()
    for size in range(1, MAX_EASY + 5):
        same(fast, eager, size, ENOUGH + MIN_REPEATS)
        assert fast.verdict == "planned", fast.why
    for size in range(1, MAX_EASY + 5):
        same(fast, eager, size, 1)
        assert fast.decided, "all of them are kept"


@pytest.mark.usefixtures("_searches_cost_nothing")
def test_shapes_that_hardly_repeat_are_not_watched_and_the_reason_says_what_to_do():
    fast, eager = made()
    for size in range(1, MAX_EASY + 1):
        same(fast, eager, size, ENOUGH)
    watched = fast._pool.config.watch.num_watched
    for size in range(20, 60):
        same(fast, eager, size, 1)
        assert not fast.decided
        assert f"it is watched once it has come {MIN_REPEATS} times" in fast.why
        assert "pad batches to a few shapes" in fast.why
    assert fast._pool.config.watch.num_watched == watched
    same(fast, eager, 25, MIN_REPEATS)
    assert fast._pool.config.watch.num_watched > watched


@pytest.mark.usefixtures("_searches_cost_nothing")
@pytest.mark.parametrize("drops", [False, True])
def test_layers_left_out_at_random_say_that_gradients_differ_and_what_to_do(drops):
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(x: torch.Tensor, left_out: int) -> torch.Tensor:
        for number, layer in enumerate(layers):
            x = x if number == left_out else torch.tanh(layer(x))
        loss = update(optimizer, x.pow(2).mean()).detach()
        if drops:
            optimizer.zero_grad()
        return loss

    reasons = set()
    with Schedule(step, layers, optimizer, planner="serial", guard=False, machine=hocket.Machine.of(cores=1)) as fast:
        for number, batch in enumerate(batches(3, 80)):
            fast(batch, number % 5)
            reasons.add(fast.why.partition(":")[0])
        assert any("sets of gradients" in why for why in reasons) != drops, reasons
        assert not any("shapes of batches" in why for why in reasons)
        assert not drops or fast.verdict == "planned", fast.why


def test_a_number_that_is_handed_to_code_that_no_plan_follows_is_named_by_its_line():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(60, 4)

    def step(begin: int) -> torch.Tensor:
        return update(optimizer, model(rows[begin : begin + 3]).pow(2).mean()).detach()

    line = f"test_pool.py:{step.__code__.co_firstlineno + 1}: do that outside the step"
    with Schedule(step, model, optimizer, planner="serial", guard=False, machine=hocket.Machine.of(cores=1)) as fast:
        for number in range(50):
            fast(number)
        assert line in fast.why


def test_a_further_shape_is_searched_once_its_steps_have_taken_as_long_as_a_search(monkeypatch):
    fast, eager = made(clock=Ticks())
    monkeypatch.setattr(pool.VariantPool, "_search_s", 20 * Ticks.STEP_S)
    for size in range(1, MAX_EASY + 1):
        same(fast, eager, size, ENOUGH)
    watched = fast._pool.config.watch.num_watched
    for batch in batches(9, 20):
        assert torch.equal(fast(batch), eager(batch))
        assert "taken as long as a search (0.02 s)" in fast.why
    assert fast._pool.config.watch.num_watched == watched
    for batch in batches(9, 1):
        fast(batch)
    assert fast._pool.config.watch.num_watched == watched + 1


def test_graphs_are_bounded_by_their_ops_and_what_was_forgotten_is_recalled(monkeypatch):
    fast, eager = made()
    same(fast, eager, 1, ENOUGH)
    monkeypatch.setattr(pool, "MAX_HELD_OPS", 3 * len(fast.graph))
    for size in range(2, 7):
        same(fast, eager, size, ENOUGH)
        held = [variant for variant in fast._pool.active._recent if variant.captured]
        assert sum(len(variant.captured.graph) for variant in held) <= 4 * len(fast.graph)
    assert 3 <= len(fast._pool.active._recent) <= 4
    for number, batch in enumerate(batches(1, 6)):
        assert torch.equal(fast(batch), eager(batch))
        assert fast.decided == (number >= 2), "watched, recorded, verified; and then it is known"
    assert fast.decision.is_recalled


def test_lanes_of_small_batches_of_many_sizes_stay_open():
    fast, eager = made()
    for size in range(1, 2 * pool.MAX_OPEN):
        same(fast, eager, size, ENOUGH)
    lanes = [variant.decision.best.executor for variant in fast._pool.active._recent if variant.decision.best]
    assert len(lanes) > pool.MAX_OPEN
    assert all(lane._core is not None for lane in lanes)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_lanes_that_were_used_last_stay_open(monkeypatch, kind):
    monkeypatch.setattr(pool, "MAX_OPEN", 2)
    monkeypatch.setattr(pool, "MAX_OPEN_BYTES", 0)
    fast, eager = made(executor=kind)
    for _ in range(2):
        for size in range(1, 6):
            same(fast, eager, size, ENOUGH)
            lanes = [variant.decision.best.executor for variant in fast._pool.active._recent if variant.decision.best]
            is_open = [bool(lane._core if kind == "native" else lane._queues) for lane in lanes]
            assert sum(is_open) <= 2
            assert is_open[-1] or kind == "python", "one Python lane is the thread of the caller"


class Temperatures:
    """A loss whose temperature is looked up by the epoch, which is one more after a number of calls."""

    def __init__(self, calls: int) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.values = {n: 1.0 + 0.1 * n for n in range(40)}
        self.num_steps, self.calls = 0, calls

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.model(batch) / self.values[self.num_steps // self.calls]).pow(2).mean()
        return update(self.optimizer, loss).detach()


@pytest.mark.parametrize(("calls", "verdict"), [(45, "planned"), (18, "eager")])
def test_a_state_for_each_epoch_is_planned_anew_and_one_that_hardly_stays_is_not(calls, verdict):
    task = Temperatures(calls)
    fast = hocket.schedule(
        task.step, task.model, task.optimizer, guard=False, planner="serial", machine=hocket.Machine.of(cores=1)
    )
    num_planned = 0
    for epoch in range(pool.MAX_STATES + 4):
        for batch in batches(5, calls):
            fast(batch)
            task.num_steps += 1
        num_planned += fast.verdict == "planned"
        assert epoch or num_planned
    assert fast.verdict == verdict
    assert (num_planned > pool.MAX_STATES) == (verdict == "planned")
    fast.close()


@pytest.mark.parametrize(("made_of", "kind"), [(lambda n: str(n).encode(), "bytes"), (str, "str")])
def test_batches_with_a_plain_value_that_is_another_one_each_time_say_so(made_of, kind):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        json.dumps({})  # it takes plain values only, so that none is followed
        return update(optimizer, model(batch["rows"]).pow(2).mean()).detach()

    fast = Schedule(step, model, optimizer, planner="serial", guard=False, machine=hocket.Machine.of(cores=1))
    for number, batch in enumerate(batches(3, MAX_EASY * 4)):
        fast({"rows": batch, "name": made_of(number)})
    assert f"another value of type {kind}" in fast.why
    assert "keep it out of the batch" in fast.why
    for batch in batches(3, ENOUGH):
        fast({"rows": batch})
    assert fast.verdict == "planned", fast.why
    fast.close()
