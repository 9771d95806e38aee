"""Population-based training: the worst go on from the states of the best, with the same values however they train."""

import copy
import random

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from tests.search.pieces import BATCHES, LR, SPACE, WIDTH, train, train_diverging, train_dropped, training, value_of
from tests.search.searches import (
    StoppedError,
    as_serial,
    assert_same,
    exploits,
    random_study,
    searched,
    stopped_and_gone_on,
)

from hocket import Population
from hocket.search.policy import Exploit
from hocket.search.split import _values
from quick import covering
from support.refusals import refused

POPULATION = Population(interval=2, share=0.3, seed=3)
EPOCHS = 7


def reference(proposals, space, fusible):
    """The algorithm once more, for a loss to be minimized: plain models, no study, no slots."""
    torch.manual_seed(0)
    members = []
    for params in proposals:
        torch.manual_seed(0)
        members.append({"params": params, "made": train(params), "values": [], "from": []})
    for epoch in range(1, EPOCHS + 1):
        for member in members:
            made = member["made"]
            made.model.train()
            for inputs, target in BATCHES:
                made.optimizer.zero_grad()
                made.loss(made.model(inputs), target).backward()
                made.optimizer.step()
            member["values"].append(value_of(made.model))
            made.scheduler.step()
        if epoch % POPULATION.interval or epoch == EPOCHS:
            continue
        ranked = sorted(range(len(members)), key=lambda number: (members[number]["values"][-1], number))
        count = int(POPULATION.share * len(members))
        drawn = random.Random(f"{POPULATION.seed} {epoch}")
        for number in ranked[-count:]:
            parent = drawn.choice(ranked[:count])
            params = POPULATION.explored(members[parent]["params"], space, fusible, f"{epoch} {number}")
            made = train(params)
            made.model.load_state_dict(members[parent]["made"].model.state_dict())
            averages = copy.deepcopy(members[parent]["made"].optimizer.state_dict()["state"])
            made.optimizer.load_state_dict({**made.optimizer.state_dict(), "state": averages})
            made.optimizer._opt_called = True
            for _ in range(epoch):
                made.scheduler.step()
            members[number] |= {"params": params, "made": made}
            members[number]["from"].append({"epoch": epoch, "parent": parent, "params": params})
    return members


def test_a_population_is_what_plain_loops_make_of_it():
    study, _ = searched(train, SPACE, trials=10, epochs=EPOCHS, halving=POPULATION, executor="serial")
    found = reference([trial.params for trial in study.trials], SPACE, ["lr", "step"])
    assert sum(len(member["from"]) for member in found) == 9
    for trial, member in zip(study.trials, found, strict=True):
        assert trial.user_attrs.get("hocket:exploits", []) == member["from"]
        assert list(trial.intermediate_values.values()) == pytest.approx(member["values"], rel=1e-9)


@pytest.mark.parametrize("slots", [None, 3])
def test_fused_populations_are_as_serial_ones(slots):
    together, record = as_serial(train_dropped, SPACE, trials=10, epochs=EPOCHS, halving=POPULATION, slots=slots)
    assert any(exploits(together).values())
    assert "fused" in {each.kind for each in record.epochs}
    moved = {number: own[-1]["params"]["width"] for number, own in exploits(together).items() if own}
    assert any(together.trials[number].params["width"] != width for number, width in moved.items())


def train_deep(params):
    """Two layers, of which only trials of depth 2 have the second one."""
    width = params["width"]
    inner = [torch.nn.Linear(8, width), torch.nn.Tanh()] if params["depth"] == 2 else []
    last = torch.nn.Linear(width if inner else 8, 3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), *inner, last).double()
    return training(model, params["lr"])


def test_a_parameter_that_changes_shapes_beside_some_others_moves_beside_the_rest():
    study = random_study()
    for depth in (1, 2, 2, 2, 2, 2):  # beside the first one the width seems to change nothing
        study.enqueue_trial({"depth": depth})
    space = {"depth": IntDistribution(1, 2), "width": WIDTH, "lr": LR}
    population = Population(interval=1, share=0.4, resample=1.0)
    searched(train_deep, space, study=study, trials=6, epochs=5, halving=population, executor="serial")
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    moves = [each for own in exploits(study).values() for each in own]
    assert len({each["params"]["lr"] for each in moves}) == len(moves)


@pytest.mark.slow
def test_populations_in_processes_are_as_here():
    population = Population(interval=1, share=0.4)
    as_serial(train, SPACE, trials=5, epochs=4, halving=population, executor="processes", processes=2)


@pytest.mark.parametrize(("after", "executor"), covering([1, 3, 5], ["fused", "serial"]))
def test_a_population_that_stops_goes_on_with_its_exploits(executor, after, tmp_path):
    options = {"trials": 6, "epochs": 5, "halving": Population(interval=1, share=0.4), "executor": executor}
    epochs = after * (6 if executor == "serial" else 1)
    whole, _ = stopped_and_gone_on(train_dropped, SPACE, tmp_path, epochs, **options)
    assert any(exploits(whole).values())


def test_a_search_that_stops_between_two_exploits_repeats_none(tmp_path, monkeypatch):
    options = {"trials": 6, "epochs": 4, "halving": Population(interval=2, share=0.4), "executor": "fused"}
    whole, _ = searched(train_dropped, SPACE, storage=optuna.storages.InMemoryStorage(), **options)
    again = {"storage": optuna.storages.InMemoryStorage(), "name": "s", "checkpoints": tmp_path, **options}
    with monkeypatch.context() as patched:

        def stops(client, run, key, value):
            raise StoppedError

        patched.setattr("hocket.search.study.StudyClient.note", stops)
        with pytest.raises(StoppedError):
            searched(train_dropped, SPACE, **again)
    study, _ = searched(train_dropped, SPACE, **again)
    assert_same(whole, study)


def test_trials_that_fail_are_no_siblings():
    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.06])}
    together, _ = as_serial(train_diverging, space, trials=9, epochs=4, halving=Population(share=0.4, resample=0.0))
    for trial in together.trials:
        assert trial.state.name == ("FAIL" if trial.params["lr"] > 0.05 else "COMPLETE")


@pytest.mark.parametrize("fusible", [True, False])
def test_a_trial_that_cannot_go_on_from_its_sibling_fails_alone(fusible):
    first = [0.001, 0.05, 0.06, 0.07]

    def picky(params):
        if params["lr"] not in (*first, *_values(LR)):
            raise RuntimeError("no such rate")
        return train(params)

    study = random_study()
    for rate in first:
        study.enqueue_trial({"lr": rate})
    options = {"trials": 4, "epochs": 2, "halving": Population(share=0.25, resample=0.0), "executor": "fused"}
    searched(picky, {"lr": LR}, study=study, fusible=["lr"] if fusible else [], **options)
    failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
    assert len(failed) == fusible  # what is infusible is the sibling's own
    for trial in failed:
        assert "cannot go on from trial" in trial.user_attrs["hocket:error"]
        assert "no such rate" in trial.user_attrs["hocket:error"]


def test_the_worst_go_on_from_the_best():
    drawn = random.Random(0)
    for _ in range(300):
        trials, share, maximize = drawn.randint(2, 30), drawn.uniform(0.05, 0.5), drawn.random() < 0.5
        policy = Population(share=share, seed=drawn.randrange(99)).policy(trials, 9, maximize)
        values = [drawn.random() for _ in range(trials)]
        assert {policy.start(number) for number in range(trials)} == {1}
        moves = list(policy.all_started())
        for number in drawn.sample(range(trials), trials):
            assert not moves  # nothing is decided before the last one is there
            moves += policy.report(number, 1, values[number])
        ranked = sorted(range(trials), key=lambda number: -values[number] if maximize else values[number])
        count = max(1, int(share * trials))
        found = {move.number: move.parent for move in moves if isinstance(move, Exploit)}
        assert set(found) == set(ranked[-count:])
        assert set(found.values()) <= set(ranked[:count])
        assert sorted(move.number for move in moves) == list(range(trials))
        assert {move.until for move in moves} == {2}


def test_what_is_explored_stays_in_the_space():
    space = {
        "lr": LR,
        "rate": FloatDistribution(0.0, 0.5, step=0.25),
        "layers": IntDistribution(2, 10, step=2),
        "units": IntDistribution(1, 512, log=True),
        "kind": CategoricalDistribution(["a", "b"]),
        "width": WIDTH,
    }
    fusible = [name for name in space if name != "width"]
    for resample in (0.0, 0.5, 1.0):
        population = Population(resample=resample, factors=(0.5, 2.0))
        seen = {name: set() for name in space}
        for number in range(200):
            params = {"lr": 0.01, "rate": 0.25, "layers": 4, "units": 32, "kind": "a", "width": 8}
            found = population.explored(params, space, fusible, str(number))
            assert found == population.explored(params, space, fusible, str(number))
            for name, value in found.items():
                assert type(value) is type(params[name])
                assert space[name]._contains(space[name].to_internal_repr(value)), (name, value)
                seen[name].add(value)
        assert seen["width"] == {8}
        assert seen["kind"] == ({"a"} if resample == 0 else {"a", "b"})
        if resample == 0:
            assert seen["lr"] == {0.005, 0.02}
            assert seen["layers"] == {2, 8}
            assert seen["units"] == {16, 64}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval": 0}, "interval: expected a whole number >= 1, got 0"),
        ({"share": 0.6}, "share: expected a number above 0 and up to 0.5, got 0.6"),
        ({"resample": 2}, "resample: expected a number from 0 to 1, got 2"),
        ({"factors": ()}, r"factors: expected numbers above 0, got \(\)"),
        ({"seed": -1}, "seed: expected a whole number >= 0, got -1"),
    ],
)
def test_bad_populations_are_named(options, words):
    refused(words, Population, **options)
