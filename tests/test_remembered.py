"""Decisions met again by a whole schedule: in another process, from a checkpoint, and where nothing can be kept."""

import json

import pytest
import torch

import forked
import hocket
from hocket import zoo
from hocket.errors import InputError, PlanError
from hocket.ir import Lane, Plan
from support.schedules import decide, state, twin

OPTIONS = {"planner": "serial", "guard": False}

ANOTHER_PROCESS = """
import json, sys, torch
import hocket
from hocket import zoo

torch.manual_seed(0)
jobs = [zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam", seed=0) for _ in range(2)]
fast = hocket.schedule(jobs[0].step, jobs[0].model, jobs[0].optimizer, planner="serial", guard=False, cache=sys.argv[1])
decided, equal = [], []
for number in range(30):
    mine, plain = fast(jobs[0].batch(number)), jobs[1].step(jobs[1].batch(number))
    decided.append(fast.decided)
    equal.append(torch.equal(mine, plain))
print(json.dumps({"decided": decided, "equal": equal, "verdict": fast.verdict, "why": fast.why}))
"""


def in_another_process(folder) -> dict:
    done = forked.run(ANOTHER_PROCESS, str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_process_runs_the_plan_from_the_sixth_step_on(tmp_path):
    first, again = in_another_process(tmp_path), in_another_process(tmp_path)
    assert all(first["equal"])
    assert all(again["equal"])
    assert again["verdict"] == "planned"
    assert again["why"] == f"{first['why']}; found by an earlier search"
    assert again["decided"] == [False] * 4 + [True] * 26
    assert first["decided"].index(True) > 6


def test_by_default_decisions_are_kept_in_the_users_cache_folder(cache_folder):
    planned, _ = twin()
    decide(hocket.schedule(planned.step, planned.model, planned.optimizer, **OPTIONS), planned)
    assert len(list((cache_folder / "hocket" / "decisions").glob("*.json"))) == 1
    planned, eager = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, **OPTIONS)
    assert decide(fast, planned) == 5
    assert fast.decision.is_recalled
    for number in range(5):
        eager.step(eager.batch(number))
    for number in range(5, 20):
        assert torch.equal(fast(planned.batch(number)), eager.step(eager.batch(number)))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(planned), state(eager), strict=True))


def test_without_a_cache_nothing_is_kept_or_found(cache_folder):
    for _ in range(2):
        planned, _ = twin()
        fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
        assert decide(fast, planned) > 5
    assert not cache_folder.exists()


def test_a_schedule_takes_its_decisions_along_with_a_checkpoint(tmp_path):
    planned, _ = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    assert fast.state_dict()["decisions"] == []
    decide(fast, planned)
    torch.save({"schedule": fast.state_dict()}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["schedule"]
    planned, _ = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    fast.load_state_dict(loaded)
    assert decide(fast, planned) == 5
    assert fast.decision.is_recalled
    assert fast.state_dict() == loaded


def test_a_state_may_be_loaded_in_the_middle_of_training():
    planned, eager = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    calls = decide(fast, planned) + 5
    for number in range(calls - 5, calls):
        fast(planned.batch(number))
    fast.load_state_dict(fast.state_dict())
    assert not fast.decided
    for number in range(calls, calls + 10):
        fast(planned.batch(number))
    assert fast.decision.is_recalled
    for number in range(calls + 10):
        eager.step(eager.batch(number))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(planned), state(eager), strict=True))


def test_the_state_of_another_model_is_said_and_the_step_is_searched(caplog):
    planned, _ = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    decide(fast, planned)
    other = zoo.load("mlp", depth=3, width=16, batch_size=4)
    slow = hocket.schedule(other.step, other.model, other.optimizer, cache=False, **OPTIONS)
    slow.load_state_dict(fast.state_dict())
    assert decide(slow, other) > 5
    assert slow.verdict == "planned"
    assert "no loaded decision is for this step here (other graphs); it is searched" in caplog.text


def test_what_is_no_state_changes_nothing():
    planned, _ = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    decide(fast, planned)
    with pytest.raises(InputError, match=r"expected the state_dict\(\) of a schedule"):
        fast.load_state_dict(planned.model.state_dict())
    assert fast.decided
    assert fast.verdict == "planned"


def test_a_given_plan_runs_and_no_planners(tmp_path):
    planned, eager = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=False, **OPTIONS)
    calls = decide(fast, planned)
    mine = Plan(fast.plan.lanes, planner="mine")
    for number in range(calls):
        eager.step(eager.batch(number))
    for _ in range(2):
        again = hocket.schedule(planned.step, planned.model, planned.optimizer, plan=mine, guard=False, cache=tmp_path)
        more = decide(again, planned)
        assert again.plan == mine
        for number in range(more):
            eager.step(eager.batch(number))
    assert again.decision.is_recalled
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(planned), state(eager), strict=True))


def test_a_given_plan_that_does_not_fit_is_an_error_in_the_call_that_would_try_it():
    planned, _ = twin()
    other = Plan((Lane("main", ("a", "b")),))
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, plan=other, cache=False)
    with pytest.raises(PlanError, match="op 'a'"):
        decide(fast, planned)
    with pytest.raises(InputError, match=r"expected a hocket\.Plan and no planner beside it"):
        hocket.schedule(planned.step, planned.model, planned.optimizer, plan=other, planner="list")
    with pytest.raises(InputError, match=r"expected a hocket\.Plan"):
        hocket.schedule(planned.step, planned.model, planned.optimizer, plan="serial")  # type: ignore[arg-type]


def test_where_no_folder_can_be_made_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    planned, _ = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, cache=tmp_path / "file" / "in", **OPTIONS)
    decide(fast, planned)
    assert fast.verdict == "planned"
    assert caplog.text.count("the decision is not remembered") == 1
