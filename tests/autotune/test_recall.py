"""A decision that is met again: a short comparison where it was clear, a full one where it was not, and no search."""

import json
import logging
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hocket
from autotune.driver import searched, stages
from hocket import zoo
from hocket.adaptation.cpu_use import CpuUse
from hocket.autotune.admission import RefusedError
from hocket.autotune.candidate import TimedStep
from hocket.autotune.verification import Difference
from hocket.ir import Plan

SEARCH = ["watch 3", "capture 1", "verify 3", "profile 4"]


def mlp(width: int = 8) -> hocket.Job:
    torch.manual_seed(0)
    return zoo.load("mlp", depth=2, width=width, batch_size=4, optimizer="sgd")


def taking(eager_ms: float, planned_ms: float) -> Callable[[TimedStep], float]:
    return lambda item: eager_ms if item.executor is None else planned_ms


def one_file(folder: Path) -> Path:
    (file,) = folder.glob("*.json")
    return file


def test_a_clear_plan_runs_from_the_fifth_step_on(tmp_path):
    first, items = searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert stages(items)[:4] == SEARCH
    again, items = searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert stages(items) == ["watch 3", "capture 1", "verify 1", "compare 4", "compare eager 4"]
    calls = [item for item in items if item.stage != "capture"]
    assert isinstance(calls[4], TimedStep)
    assert calls[4].executor is not None
    assert (first.is_recalled, again.is_recalled) == (False, True)
    assert again.kind == first.kind == "planned"
    assert again.reason == f"{first.reason}; found by an earlier search"
    assert (again.speedup, again.low, again.high, again.eager_ms) == (1.5, 1.5, 1.5, first.eager_ms)
    assert first.best is not None
    assert again.best is not None
    assert again.best.plan == first.best.plan
    assert again.best.costs == first.best.costs
    assert again.best.steps_ms == first.best.steps_ms
    assert again.expected_ms == 2.0


def test_a_decision_is_met_again_though_slower_forms_were_forgotten(tmp_path):
    def took(item: TimedStep) -> float:
        if item.executor is None:
            return 3.0
        return 2.0 if "_fused_" not in str(item.executor.captured.graph.order) else 2.5  # the rewritten form

    first, _ = searched(mlp(), took, tmp_path, numerics="close")
    assert first.best is not None
    assert first.best.form == ""
    assert searched(mlp(), took, tmp_path, numerics="close")[0].is_recalled


def test_a_plan_that_loses_now_is_searched_for_and_remembered_anew(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    searched(mlp(), taking(3.0, 2.0), tmp_path)
    now, items = searched(mlp(), taking(2.0, 3.0), tmp_path)
    assert "the remembered plan takes 1.50x of eager's time now" in caplog.text
    assert stages(items)[2:7] == ["verify 1", "compare 4", "compare eager 4", "verify 3", "profile 4"]
    assert (now.kind, now.is_recalled) == ("eager", False)
    assert searched(mlp(), taking(2.0, 3.0), tmp_path)[0].is_recalled
    assert json.loads(one_file(tmp_path).read_text())["decision"]["kind"] == "eager"


def test_a_plan_that_gains_less_now_is_compared_anew(tmp_path):
    searched(mlp(), taking(3.0, 1.0), tmp_path)
    now, items = searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert not any(item.stage == "profile" for item in items), "no search"
    assert (now.kind, now.speedup, now.is_recalled) == ("planned", 1.5, False)
    assert searched(mlp(), taking(3.0, 2.0), tmp_path)[0].speedup == 1.5


def test_eager_where_it_was_clearly_faster_costs_one_step(tmp_path):
    searched(mlp(), taking(2.0, 3.0), tmp_path)
    again, items = searched(mlp(), taking(2.0, 3.0), tmp_path)
    assert stages(items) == ["watch 3", "capture 1", "compare eager 1"]
    assert (again.kind, again.best, again.is_recalled) == ("eager", None, True)
    assert again.candidate is not None, "the plan that lost can still be looked at"


@contextmanager
def beside_another():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuUse, "cores_of_others", lambda self: 0.9)
        yield


def test_eager_beside_another_program_is_compared_anew(tmp_path):
    """It was clearly faster then. With the machine to itself the plan is."""
    with beside_another():
        first, items = searched(mlp(), taking(2.0, 3.0), tmp_path)
    assert "compare eager 7" in stages(items), "threads have to settle"
    assert first.kind == "eager"
    assert "beside other processes that used 0.9 cores" in first.reason
    again, items = searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert stages(items) == ["watch 3", "capture 1", "verify 1", *["compare eager 4", "compare 4"] * 3]
    assert again.kind == "planned"
    assert "beside" not in again.reason


def test_eager_at_once_beside_another_program_is_searched_anew(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def job() -> hocket.Job:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hocket.Job(lambda batch: model(batch).detach(), model, optimizer, [torch.ones(2, 4)])

    with beside_another():
        first, _ = searched(job(), taking(0.001, 0.001), tmp_path)
    assert (first.kind, first.candidate) == ("eager", None)
    again, _ = searched(job(), taking(0.001, 0.001), tmp_path)
    assert not again.is_recalled
    once_more, _ = searched(job(), taking(0.001, 0.001), tmp_path)
    assert once_more.is_recalled


def test_what_made_no_difference_is_compared_again_and_may_turn_out_faster(tmp_path):
    searched(mlp(), taking(2.0, 2.0), tmp_path)
    again, items = searched(mlp(), taking(2.0, 1.0), tmp_path)
    assert not any(item.stage == "profile" for item in items)
    assert (again.kind, again.is_recalled) == ("planned", False)
    last, _ = searched(mlp(), taking(2.0, 1.0), tmp_path)
    assert (last.kind, last.is_recalled) == ("planned", True), "the new comparison was remembered"


def test_without_a_guard_it_runs_uncompared(tmp_path):
    searched(mlp(), taking(2.0, 3.0), tmp_path, guard=False)
    again, items = searched(mlp(), taking(2.0, 3.0), tmp_path, guard=False)
    assert stages(items) == ["watch 3", "capture 1", "verify 1"]
    assert (again.kind, again.is_recalled) == ("planned", True)


def test_a_plan_of_the_split_backward_comes_back_split(tmp_path):
    def job() -> hocket.Job:
        torch.manual_seed(0)
        return zoo.load("lenet", batch_size=2)

    def takes_ms(item: TimedStep) -> float:
        if item.executor is None:
            return 9.0
        return 1.0 if any("weight" in op.role for op in item.executor.captured.graph.ops) else 5.0

    first, _ = searched(job(), takes_ms, tmp_path, cores=2)
    again, _ = searched(job(), takes_ms, tmp_path, cores=2)
    assert again.is_recalled
    assert first.best is not None
    assert again.best is not None
    assert again.best.captured.graph == first.best.captured.graph


@pytest.mark.parametrize(
    ("asked", "about"),
    [({"planner": "serial"}, "planner"), ({"guard": False}, "guard"), ({"executor": "python"}, "executor")],
)
def test_what_was_asked_for_is_part_of_what_it_is_about(tmp_path, asked, about):
    searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert not searched(mlp(), taking(3.0, 2.0), tmp_path, **asked)[0].is_recalled, about


def test_another_model_machine_or_number_of_threads_is_searched(tmp_path):
    searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert not searched(mlp(width=12), taking(3.0, 2.0), tmp_path)[0].is_recalled
    assert not searched(mlp(), taking(3.0, 2.0), tmp_path, cores=2)[0].is_recalled
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not searched(mlp(), taking(3.0, 2.0), tmp_path)[0].is_recalled
    finally:
        torch.set_num_threads(threads)


def _without_an_op(plan: str) -> str:
    lines = plan.splitlines()
    lines.remove(next(line for line in lines if line.startswith("run ")))
    return "\n".join(lines)


def _backwards(plan: str) -> str:
    made = Plan.parse(plan)
    (lane,) = made.lanes
    ops = [f"run {op}" for op in reversed(lane.ops)]
    return "\n".join([*plan.splitlines()[:2], *ops])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_without_an_op, "by no lane"),
        (_backwards, "deadlock"),
        (lambda plan: plan[: len(plan) // 2].rsplit("\n", 1)[0], "by no lane"),
        (lambda plan: plan.replace("run ", "walk "), "walk"),
    ],
    ids=["an op is missing", "the order is reversed", "cut in half", "no plan"],
)
def test_an_edited_plan_is_ignored_by_name_and_searched(tmp_path, caplog, edit, says):
    searched(mlp(), taking(3.0, 2.0), tmp_path)
    document = json.loads(one_file(tmp_path).read_text())
    document["plan"]["text"] = edit(document["plan"]["text"])
    one_file(tmp_path).write_text(json.dumps(document))
    again, items = searched(mlp(), taking(3.0, 2.0), tmp_path)
    assert stages(items)[:4] == SEARCH
    assert (again.kind, again.is_recalled) == ("planned", False)
    (line,) = [record.message for record in caplog.records if "a remembered decision is ignored" in record.message]
    assert re.search(says, line), line


def test_a_capture_that_is_not_eager_any_more_is_refused_although_remembered(tmp_path, monkeypatch):
    searched(mlp(), taking(3.0, 2.0), tmp_path)
    wrong = Difference(1.0, 1.0, False, "gradient of 0.weight", 1)
    monkeypatch.setattr("hocket.autotune.runner.verify", lambda *_, **__: (wrong, (None,)))
    with pytest.raises(RefusedError, match=r"differs from eager by 1 in gradient of 0\.weight"):
        searched(mlp(), taking(3.0, 2.0), tmp_path)
