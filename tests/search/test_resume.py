"""A search that is killed goes on where it stopped: no trial twice, no rung lost, the same best trial."""

import random
import signal
import time
from dataclasses import replace

import optuna
import pytest
import torch
from tests.search import killed
from tests.search.pieces import BATCHES, LR, SPACE, train, train_counting, train_dropped, value_of
from tests.search.searches import as_serial, assert_same, random_study, searched, stopped_and_gone_on, stopping
from torch.nn import functional

import forked
from hocket import Halving
from hocket.errors import FormatError
from hocket.search.checkpoints import Checkpoints
from quick import covering
from support.refusals import fails, refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Result and duration of a search that is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    start = time.perf_counter()
    study = killed.run(folder)
    return study, time.perf_counter() - start


def begun(folder, *where):
    """A process that has begun to search, and the pipe on which it says that it is done."""
    context = forked.context()
    ours, theirs = context.Pipe()
    process = context.Process(target=killed.killed, args=(theirs, folder, *where), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "begins"
    return process, ours


def ended(folder):
    """End of a search that is not killed."""
    process, pipe = begun(folder)
    said = pipe.recv()
    process.join()
    return said, process.exitcode


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_search_that_is_killed_ends_as_one_that_is_not(kills, whole, tmp_path):
    study, took_s = whole
    drawn = random.Random(kills)
    for _ in range(kills):
        process, _ = begun(tmp_path)
        time.sleep(drawn.uniform(0, 1.2 * took_s))
        process.kill()
        process.join()
    assert ended(tmp_path) == ("done", 0)
    found = optuna.load_study(study_name="killed", storage=f"sqlite:///{tmp_path / 'study.db'}")
    begun_ = [trial for trial in found.trials if trial.state.is_finished()]
    assert len(begun_) == killed.TRIALS
    assert found.best_trial.params == study.best_trial.params
    assert found.best_value == pytest.approx(study.best_value, rel=1e-9)
    for first, second in zip(study.trials, begun_, strict=True):
        assert (first.state, first.params) == (second.state, second.params)
        assert first.intermediate_values == pytest.approx(second.intermediate_values, rel=1e-9)
    over = (tmp_path / "over").read_text().split()
    assert len(over) == len(set(over))
    assert not list((tmp_path / "states").glob("trial-*"))


def enqueued_study(folder):
    study = optuna.create_study(study_name="killed", storage=killed.storage_in(folder))
    study.enqueue_trial({"lr": 0.02, "width": 12})
    study.enqueue_trial({"lr": 0.03})


def test_a_search_that_is_killed_while_it_asks_for_a_trial_knows_it_again(tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        enqueued_study(tmp_path / name)
    study = killed.run(tmp_path / "whole")
    for where in (
        ("set_trial_user_attr", 1),  # the first enqueued trial is claimed, and waits still
        ("set_trial_state_values", 1),  # it is taken, and nothing says by whom but the claim
        ("set_trial_param", 2),  # two of its three parameters are there
        ("create_new_trial", 2),  # after the second enqueued one: two more, the last one without parameters
        ("set_trial_param", 4),  # one of its parameters is there
    ):
        process, _ = begun(tmp_path / "parts", *where)
        process.join()
        assert process.exitcode == -signal.SIGKILL, where
    assert ended(tmp_path / "parts") == ("done", 0)
    found = optuna.load_study(study_name="killed", storage=killed.storage_in(tmp_path / "parts"))
    assert_same(study, found)
    assert len(found.trials) == killed.TRIALS


@pytest.mark.parametrize(("after", "executor"), covering([1, 3, 5], ["fused", "serial"]))
def test_a_search_that_stops_at_an_epoch_goes_on_with_it(executor, after, tmp_path):
    options = {"trials": 8, "epochs": 4, "halving": Halving(eta=2), "executor": executor}
    stopped_and_gone_on(train_dropped, SPACE, tmp_path, after, **options)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_what_a_model_counts_in_python_moves_and_is_kept_with_it(tmp_path):
    options = {"trials": 6, "epochs": 4, "halving": Halving(eta=2), "executor": "fused", "slots": 2}
    as_serial(train_counting, {"lr": LR}, **options)
    stopped_and_gone_on(train_counting, {"lr": LR}, tmp_path, 2, **options)


@pytest.mark.parametrize("after", [2, 3])
def test_a_rung_is_decided_again_as_it_was_before_one_of_its_trials_failed(after, tmp_path):
    def late(params):
        calls = 0

        def metric(outputs, target):
            nonlocal calls
            calls += 1
            if params["lr"] > 0.08 and calls > len(BATCHES):  # in the second epoch, after the first rung
                raise RuntimeError("no more")
            return functional.cross_entropy(outputs, target)

        return replace(train(params), metric=metric)

    options = {"trials": 6, "epochs": 4, "halving": Halving(eta=2), "executor": "fused"}
    whole, _ = stopped_and_gone_on(late, {"lr": LR}, tmp_path, after, **options)
    states = [trial.state.name for trial in whole.trials]
    assert {"COMPLETE", "PRUNED", "FAIL"} == set(states), states


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_the_best_state_is_kept(executor, tmp_path):
    study, _ = searched(train, SPACE, study=random_study(), trials=5, epochs=2, checkpoints=tmp_path, executor=executor)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["values"][-1] == study.best_value
    made = train(study.best_params)
    made.model.load_state_dict(best["model"])
    assert value_of(made.model) == pytest.approx(study.best_value, rel=1e-9)


def test_an_interrupted_search_leaves_its_study_whole(tmp_path):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with pytest.raises(KeyboardInterrupt):
        searched(train, SPACE, study=study, trials=4, epochs=3, on_progress=stopping(2, KeyboardInterrupt))
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * 4
    assert "ended before the trial did" in study.trials[0].user_attrs["hocket:error"]
    searched(train, SPACE, study=study, trials=2, epochs=2)
    assert [trial.state.name for trial in study.trials][4:] == ["COMPLETE"] * 2


def test_a_study_is_gone_on_with_by_more_trials(tmp_path):
    options = {"epochs": 2, "checkpoints": tmp_path, "name": "s", "storage": optuna.storages.InMemoryStorage()}
    searched(train, SPACE, trials=3, **options)
    study, record = searched(train, SPACE, trials=5, **options)
    assert len(study.trials) == 5
    assert {each.number for each in record.epochs} == {3, 4}
    assert len({trial.params["lr"] for trial in study.trials}) == 5


def test_checkpoints_are_written_whole_and_hold_plain_tensors(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save(3, {"values": [0.5], "model": {"weight": torch.ones(2)}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "search.json", "trial-3.pt"]
    assert torch.load(tmp_path / "trial-3.pt", weights_only=True)["model"]["weight"].tolist() == [1.0, 1.0]
    assert kept.load(4) is None
    (tmp_path / "trial-3.pt").write_bytes(b"half")
    kept.close()
    fails(FormatError, r"trial-3\.pt: expected the state of a trial", kept.load, 3)


def test_two_searches_do_not_share_a_folder(tmp_path):
    kept = Checkpoints(tmp_path)
    refused("another search works in", Checkpoints, tmp_path)
    owner = kept.owner
    kept.close()
    again = Checkpoints(tmp_path)
    assert again.owner == owner
    again.close()
    (tmp_path / "search.json").write_text("{}")
    fails(FormatError, "hocket-search/1", Checkpoints, tmp_path)
