"""The store of decisions: what is read is checked, what cannot be written is said, and training goes on."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

import forked
from hocket.autotune import store as store_module
from hocket.autotune.store import DecisionStore, Remembered, RememberedPlan, user_folder
from hocket.errors import InputError
from hocket.ir import Costs
from hocket.ir.costs import Share
from support.mutations import mutated

ABOUT = {"graphs": {"": "abc"}, "threads": 2, "torch": "2.13.0"}
COSTS = Costs({"a": {"1": 2.0, "gpu0": 1.0}}, {"a": {"1": 0.5}}, shares={"a": {"gpu0": Share(0.5, 0.25)}})
PLAN = RememberedPlan("", True, "hocket-plan/1", (2.0, 2.1), COSTS)
PLANNED = Remembered("planned", "it is faster", 1.5, 1.4, 1.6, (3.0, 3.1), plan=PLAN)
EAGER = Remembered("eager", "one op has all the time")


@pytest.mark.parametrize("decision", [PLANNED, EAGER], ids=["planned", "eager"])
def test_what_is_kept_is_found_by_another_store_of_the_folder(tmp_path, decision):
    DecisionStore(tmp_path / "new" / "folder").keep(ABOUT, decision)
    assert DecisionStore(tmp_path / "new" / "folder").find(ABOUT) == decision
    assert DecisionStore(tmp_path / "new" / "folder").find({**ABOUT, "threads": 4}) is None
    assert not list((tmp_path / "new" / "folder").glob("*.tmp"))


def test_a_folder_that_is_not_there_has_nothing(tmp_path):
    assert DecisionStore(tmp_path / "none").find(ABOUT) is None
    assert not (tmp_path / "none").exists()


def test_without_a_folder_it_lasts_as_long_as_the_store():
    kept = DecisionStore(None)
    kept.keep(ABOUT, PLANNED)
    assert kept.find(ABOUT) == PLANNED
    assert DecisionStore(None).find(ABOUT) is None


def _set(*keys, value):
    def edit(text: str) -> str:
        document = json.loads(text)
        place = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(document)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "", "not JSON"),
        (lambda text: "[]", "expected an object"),
        (_set("format", value="hocket-decision/9"), "expected \"hocket-decision/1\", got 'hocket-decision/9'"),
        (_set("about", "threads", value=64), "about: it is about another step, machine or version"),
        (_set("decision", "kind", value="fast"), "decision.kind: expected planned"),
        (_set("decision", "speedup", value="high"), "decision.speedup: expected a number"),
        (_set("decision", "hint", value=1), "unknown field 'hint'"),
        (_set("plan", value=None), "decision.kind: expected planned (with a plan)"),
        (_set("plan", "split", value=3), "plan.split: expected true or false"),
        (_set("plan", "steps_ms", value=[-1]), "plan.steps_ms[0]: expected a finite number >= 0"),
        (_set("plan", "costs", "durations_us", value={"a": {"0": 1.0}}), "durations_us['a']"),
        (_set("plan", "costs", "format", value="?"), "plan.costs.format"),
    ],
)
def test_a_file_that_does_not_read_is_ignored_with_one_line_that_names_it(tmp_path, caplog, edit, says):
    DecisionStore(tmp_path).keep(ABOUT, PLANNED)
    (file,) = tmp_path.iterdir()
    file.write_text(edit(file.read_text()))
    assert DecisionStore(tmp_path).find(ABOUT) is None
    (record,) = caplog.records
    assert says in record.message
    assert str(file) in record.message
    DecisionStore(tmp_path).keep(ABOUT, PLANNED)
    assert DecisionStore(tmp_path).find(ABOUT) == PLANNED


def test_mutated_files_are_found_or_ignored_with_one_line(tmp_path, caplog):
    DecisionStore(tmp_path).keep(ABOUT, PLANNED)
    (file,) = tmp_path.iterdir()
    sound, num_ignored = file.read_bytes(), 0
    for case in range(300):
        file.write_bytes(mutated(sound, random.Random(case)))
        caplog.clear()
        found = DecisionStore(tmp_path).find(ABOUT)
        assert len(caplog.records) == (found is None), case
        num_ignored += found is None
    assert 100 < num_ignored < 300


def test_where_nothing_can_be_written_it_is_said_and_the_decision_stands(tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    kept = DecisionStore(tmp_path / "file" / "folder")
    kept.keep(ABOUT, PLANNED)
    assert "the decision is not remembered: " in caplog.text
    assert kept.find(ABOUT) == PLANNED

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_document", full)
    DecisionStore(tmp_path).keep(ABOUT, EAGER)
    assert "No space left on device" in caplog.text


def test_a_folder_that_may_only_be_read_still_tells_what_it_has(tmp_path, monkeypatch):
    DecisionStore(tmp_path).keep(ABOUT, PLANNED)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    assert DecisionStore(tmp_path).find(ABOUT) == PLANNED


def test_a_time_that_is_no_number_is_not_written(tmp_path, caplog):
    DecisionStore(tmp_path).keep(ABOUT, Remembered("eager", "", float("inf")))
    assert "the decision is not remembered" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_folder_stays_below_its_bound_and_what_was_used_last_stays(tmp_path, monkeypatch):
    kept = DecisionStore(tmp_path)
    kept.keep({**ABOUT, "threads": 1}, PLANNED)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(store_module, "MAX_FOLDER_BYTES", 3 * file.stat().st_size + 100)
    hour = 3600
    os.utime(file, (time.time() - 9 * hour,) * 2)
    for threads in (2, 3):
        before = set(tmp_path.iterdir())
        kept.keep({**ABOUT, "threads": threads}, PLANNED)
        (new,) = set(tmp_path.iterdir()) - before
        os.utime(new, (time.time() - (9 - threads) * hour,) * 2)
    assert DecisionStore(tmp_path).find({**ABOUT, "threads": 1}) == PLANNED  # it has been used now
    DecisionStore(tmp_path).keep({**ABOUT, "threads": 4}, PLANNED)
    left = [threads for threads in range(1, 5) if DecisionStore(tmp_path).find({**ABOUT, "threads": threads})]
    assert left == [1, 3, 4]


def _keep_and_find(folder: Path, number: int) -> None:
    kept = DecisionStore(folder)
    for threads in range(40):
        kept.keep({**ABOUT, "threads": threads % 5}, PLANNED)
        found = DecisionStore(folder).find({**ABOUT, "threads": (threads + number) % 5})
        assert found in (None, PLANNED)


def test_two_processes_share_a_folder(tmp_path, caplog):
    processes = [forked.context().Process(target=_keep_and_find, args=(tmp_path, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 5
    assert not caplog.records


def test_a_state_survives_a_checkpoint_of_torch(tmp_path):
    kept = DecisionStore(None)
    kept.keep(ABOUT, PLANNED)
    torch.save(kept.state(), tmp_path / "checkpoint.pt")
    other = DecisionStore(None)
    other.load(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert other.find(ABOUT) == PLANNED
    assert other.state() == kept.state()


def test_a_state_of_another_step_is_said_once_with_what_differs(caplog):
    kept, other = DecisionStore(None), DecisionStore(None)
    kept.keep(ABOUT, PLANNED)
    other.load(kept.state())
    assert other.find({**ABOUT, "graphs": {"": "def"}, "torch": "2.14.0"}) is None
    assert other.find({**ABOUT, "graphs": {"": "def"}}) is None
    (record,) = caplog.records
    assert record.message.endswith("no loaded decision is for this step here (other graphs, torch); it is searched")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, r"expected the state_dict\(\) of a schedule"),
        (None, r"expected the state_dict\(\) of a schedule"),
        ({"format": "hocket-decisions/1"}, "missing field 'decisions'"),
        ({"format": "hocket-decisions/1", "decisions": [{}]}, r"decisions\[0\]: missing field 'about'"),
        (
            {"format": "hocket-decisions/1", "decisions": [{"about": {}, "format": "?"}]},
            r"decisions\[0\]\.format: expected",
        ),
    ],
)
def test_what_is_no_state_is_refused_by_place(state, says):
    with pytest.raises(InputError, match=says):
        DecisionStore(None).load(state)


def test_the_cache_argument_names_the_folder(tmp_path, cache_folder):
    assert DecisionStore.of(False).folder is None
    assert DecisionStore.of(True).folder == user_folder() == cache_folder / "hocket" / "decisions"
    assert DecisionStore.of(str(tmp_path)).folder == tmp_path
    with pytest.raises(InputError, match="cache: expected True, False or a folder, got int"):
        DecisionStore.of(3)  # type: ignore[arg-type]
