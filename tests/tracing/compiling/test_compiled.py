"""The compiled form of a small step: close to eager, in float64 equal to it, ordered, and caught where it is wrong."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket import native
from hocket.autotune.closeness import Closeness, sample
from hocket.checking import check
from hocket.errors import PlanError, StaleCaptureError
from hocket.execution.native import NativeLanes
from hocket.ir import Lane, Machine, Plan
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling.folder import Compiling
from hocket.tracing.compiling.listing import FORMAT
from hocket.tracing.program import Call
from support.captures import closeness, compiled_steps, one_lane
from support.steps import training_step

pytestmark = pytest.mark.skipif(not native.available(), reason=native.available().why)


@dataclass
class Case:
    """A step that has run, captured, and compiled into a folder."""

    step: Callable[[Any], Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]
    plain: Captured
    folder: Path
    form: Captured

    def closeness(self, form: Captured) -> Closeness:
        return closeness(self.plain, form, self.step, self.batch, threads=1)


def views(batch: Any) -> Any:
    """Views of inputs, and of what else the step leaves. Two tensors that it only reads share memory."""
    x, flat, weight = batch
    hidden = torch.mm(x, weight.t()).relu()
    hidden = hidden * torch.sigmoid(hidden)
    first, second = hidden.split(2, 1)
    return hidden, hidden.view(-1), weight.t(), second, flat.sum() + first.sum()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """A step that trains, and `views`; compiled by one process, which takes seconds to begin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    batch = (torch.randn(4, 16), torch.randint(0, 8, (4,)))
    step = training_step(model, optimizer)
    step(batch)
    plain = capture_step(step, model, optimizer, batch, split=False)
    x = torch.randn(3, 4)
    shared: Any = [x, x.view(-1), torch.randn(4, 4)]
    views(shared)
    viewed = capture_step(views, [], [], shared, split=False)
    folders = [tmp_path_factory.mktemp("compiled") for _ in range(2)]
    forms = compiled_steps(list(zip((plain, viewed), folders, strict=True)), threads=2)
    return [
        Case(step, model, optimizer, batch, plain, folders[0], forms[0]),
        Case(views, model, optimizer, shared, viewed, folders[1], forms[1]),
    ]


@pytest.fixture(scope="module")
def case(cases: list[Case]) -> Case:
    return cases[0]


def test_it_is_close_and_in_float64_equal(case: Case) -> None:
    assert case.form.wide is not None
    assert len(case.form.graph) < len(case.plain.graph) / 2
    seen = case.closeness(case.form)
    assert seen.holds, seen.why


def _with_number(form: Captured, change: Callable[[int, Any], Any]) -> Captured:
    """The form with other arguments in the op that reads the step's numbers, in both precisions."""

    def changed(call: Call) -> Call:
        if call.func is not torch.ops.hocket.checked_numbers.default:
            return call
        layouts, given, numbers = call.args
        return replace(call, args=(layouts, given, tuple(change(n, each) for n, each in enumerate(numbers))))

    program = form.program
    actions = tuple(replace(action, calls=tuple(map(changed, action.calls))) for action in program.actions)
    wide = None if form.wide is None else _with_number(form.wide, change)
    return replace(form, program=replace(program, actions=actions), wide=wide)


def _rates(case: Case) -> dict[int, float]:
    """The step's numbers as they are now, by their entry of the tape."""
    numbers = case.plain.numbers(case.batch)
    assert numbers is not None
    return dict(enumerate(numbers))


def test_a_changed_dropout_is_caught(case: Case) -> None:
    def rarer(form: Captured) -> Captured:
        found = [call for action in form.program.actions for call in action.calls]
        assert any(call.func is torch.ops.aten.bernoulli.p for call in found)
        actions = tuple(replace(action, calls=tuple(map(changed, action.calls))) for action in form.program.actions)
        wide = None if form.wide is None else rarer(form.wide)
        return replace(form, program=replace(form.program, actions=actions), wide=wide)

    def changed(call: Call) -> Call:
        return replace(call, args=(call.args[0], 0.6)) if call.func is torch.ops.aten.bernoulli.p else call

    seen = case.closeness(rarer(case.form))
    assert not seen.holds
    assert "in float64" in seen.why
    assert not case.closeness(replace(rarer(case.form), wide=None)).holds


def test_float64_finds_what_float32_hides(case: Case) -> None:
    """Every number off by a millionth part: less than float32's rounding allows, of one step."""
    now = _rates(case)
    wrong = _with_number(case.form, lambda _, ref: now[ref.index] * (1 + 1e-6))
    with one_lane(case.plain, 1) as eager, one_lane(wrong, 1) as executor:
        narrow, _ = sample(case.plain, eager, {"form": executor}, case.batch, None)
        case.step(case.batch)
    assert not isinstance(narrow["form"], str)
    assert wrong.wide is not None
    now |= _rates(case)
    with one_lane(case.plain, 1) as eager, one_lane(wrong, 1) as executor:
        found, _ = sample(case.plain, eager, {"form": executor}, case.batch, None, {"form": wrong.wide})
    assert isinstance(found["form"], str)
    assert "in float64" in found["form"]


def test_native_lanes_run_it_on_one_lane_and_on_two(case: Case) -> None:
    machine, ops = Machine.of(cores=2), case.form.graph.order
    updates = {op.name for op in case.form.graph.ops if op.role == "update"}
    first = Lane("first", tuple(op for op in ops if op not in updates), cores=(0,))
    second = Lane("second", tuple(op for op in ops if op in updates), cores=(1,))
    one, two = Plan((Lane("main", ops, cores=(0, 1), width=2),)), Plan((first, second))
    for plan in (one, two):
        check(case.form.graph, plan, machine)
        with closing(NativeLanes(case.form, plan, machine)) as executor, one_lane(case.plain, 1) as eager:
            found, _ = sample(case.plain, eager, {"form": executor}, case.batch, 0)
        seen = Closeness().and_sample(found["form"])
        assert not seen.error


def test_writes_of_parameters_keep_their_order(case: Case) -> None:
    """A plan that updates a weight before the backward has read it is refused."""
    written = {name for op in case.form.graph.ops for name in op.writes}
    names = {entry.name for entry in case.plain.trace.places.parameters}
    assert names <= written
    weight = "3.weight"
    update = next(op.name for op in case.form.graph.ops if weight in op.writes)
    reader = next(op.name for op in case.form.graph.ops if weight in op.reads and op.name != update)
    order = [op for op in case.form.graph.order if op != update]
    order.insert(order.index(reader), update)
    with pytest.raises(PlanError, match=r"(?s)."):
        check(case.form.graph, Plan((Lane("main", tuple(order), cores=(0,)),)), Machine.of(cores=1))


def test_an_input_of_another_layout_is_refused_before_anything_is_written(case: Case) -> None:
    before = [p.detach().clone() for p in case.model.parameters()]
    weight = case.model[0].weight  # type: ignore[index]
    usual = weight.data
    weight.data = usual.t().contiguous().t()
    try:
        with one_lane(case.form, 1) as executor, pytest.raises(StaleCaptureError, match="not the type or the layout"):
            executor(case.batch)
    finally:
        weight.data = usual
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))


def test_a_label_that_does_not_exist_raises_and_writes_nothing(case: Case) -> None:
    before = [p.detach().clone() for p in case.model.parameters()]
    bad = (case.batch[0], torch.full_like(case.batch[1], 99))
    with one_lane(case.form, 1) as executor, pytest.raises(IndexError, match="out of bounds"):
        executor(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))


def test_a_folder_that_may_only_be_read_gives_what_it_has(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.utime", refused)
    assert Compiling(case.plain, case.folder, threads=2).found() is not None


def test_it_is_kept_and_what_is_damaged_is_compiled_again(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    kept = Compiling(case.plain, case.folder, threads=2)
    found = kept.found()
    assert found is not None
    assert found.graph.fingerprint == case.form.graph.fingerprint
    assert Compiling(case.plain, case.folder, threads=1).found() is None
    (listing,) = case.folder.glob("*/listing.json")
    text = listing.read_text()
    listing.write_text(text.replace(FORMAT, "hocket-compiled/0"))
    with caplog.at_level("INFO", "hocket"):
        assert kept.found() is None
    assert "is compiled again" in caplog.text
    assert not listing.exists()


def test_views_are_left_as_views(cases: list[Case]) -> None:
    form, batch = cases[1].form, cases[1].batch
    seen = cases[1].closeness(form)
    assert seen.holds, seen.why
    with one_lane(form, 1) as executor:
        hidden, flat, weight, second, _ = executor(batch)
    storages = [value.untyped_storage().data_ptr() for value in (hidden, flat, second)]
    assert len(set(storages)) == 1
    assert weight.untyped_storage().data_ptr() == batch[2].untyped_storage().data_ptr()
    assert (weight.stride(), second.storage_offset()) == ((1, 4), 2)
