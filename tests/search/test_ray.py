"""Groups that train in Ray's actors, as `examples/tune_on_ray.py` has it, have the values that they have here."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from optuna.distributions import CategoricalDistribution
from tests.search.pieces import LR, SPACE, train
from tests.search.searches import assert_same, random_study, searched

from hocket.errors import ExecutionError

REPORTED = []


class Tuner:
    """Ray's, as far as the example uses it: calls the trainable here for each point of the grid."""

    def __init__(self, trainable, param_space, run_config=None):
        self.trainable, self.groups = trainable, param_space["group"]

    def fit(self):
        for group in self.groups:
            REPORTED.clear()
            try:
                self.trainable({"group": group})
                yield SimpleNamespace(config={"group": group}, error=None, metrics=REPORTED[-1])
            except Exception as error:  # noqa: BLE001 - as Ray does
                yield SimpleNamespace(config={"group": group}, error=error, metrics=None)


@pytest.fixture(params=["stub", "ray"])
def tune_on_ray(request, tmp_path, monkeypatch):
    """The example's function on a stub of Ray, or on a Ray of two processors where that is installed."""
    config = None
    if request.param == "stub":
        tune = ModuleType("ray.tune")
        tune.Tuner, tune.report, tune.grid_search = Tuner, REPORTED.append, list
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
        monkeypatch.setattr(sys.modules["ray"], "tune", tune, raising=False)
    else:
        pytest.importorskip("ray.tune", reason="needs Ray Tune: pip install 'hocket[ray]'")
        import ray

        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
        config = ray.tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    monkeypatch.delitem(sys.modules, "examples.tune_on_ray", raising=False)
    example = importlib.import_module("examples.tune_on_ray")
    yield lambda *args, **named: example.tune_on_ray(*args, run_config=config, **named)
    if request.param == "ray":
        sys.modules["ray"].shutdown()


@pytest.mark.filterwarnings("default")  # Ray's own
def test_groups_in_actors_are_as_here(tune_on_ray):
    def breaking(params):
        if params["lr"] == 0.03:
            raise RuntimeError("not this one")
        return train(params)

    space = SPACE | {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    here, _ = searched(breaking, space, trials=8, epochs=3, executor="serial")
    there = tune_on_ray(
        breaking, space, 8, 3, study=random_study(), executor="fused", slots=3, infusible=list(SPACE.keys() - {"lr"})
    )
    assert {trial.state.name for trial in here.trials} == {"COMPLETE", "FAIL"}
    assert_same(here, there)
    failed = [trial for trial in there.trials if trial.state.name == "FAIL"]
    assert all("not this one" in trial.user_attrs["hocket:error"] for trial in failed)


@pytest.mark.filterwarnings("default")
def test_an_actor_that_fails_is_told_and_raised(tune_on_ray):
    study = random_study()
    with pytest.raises(ExecutionError, match="1 of 1 groups failed on Ray"):
        tune_on_ray(train, {"lr": LR}, 2, study=study, epochs=1, storage="none")
    assert {trial.state.name for trial in study.trials} == {"FAIL"}
