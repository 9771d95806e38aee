"""Groups that train in Ray's actors have the values that they have here."""

from __future__ import annotations

import sys

import pytest
from optuna.distributions import CategoricalDistribution
from tests.search.pieces import LR, SPACE, assert_same, random_study, searched, train

from hocket.errors import MissingDependencyError
from hocket.search.ray import tune_on_ray


def test_without_ray_one_line_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"hocket.search.ray needs ray.tune: pip install 'hocket\[ray\]'"):
        tune_on_ray(train, {"lr": LR}, 2, 1)


@pytest.fixture
def ray(tmp_path):
    """A Ray of two processors, which keeps its files here; skipped where it is not installed."""
    pytest.importorskip("ray.tune", reason="needs Ray Tune: pip install 'hocket[ray]'")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    yield ray.tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    ray.shutdown()


@pytest.mark.filterwarnings("default")  # Ray's own
def test_groups_in_actors_are_as_here(ray):
    def breaking(params):
        if params["lr"] == 0.03:
            raise RuntimeError("not this one")
        return train(params)

    space = SPACE | {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    here, _ = searched(breaking, space, trials=8, epochs=3, executor="serial")
    there = tune_on_ray(breaking, space, 8, 3, study=random_study(), executor="fused", slots=3, run_config=ray)
    assert {trial.state.name for trial in here.trials} == {"COMPLETE", "FAIL"}
    assert_same(here, there)
    failed = [trial for trial in there.trials if trial.state.name == "FAIL"]
    assert all("not this one" in trial.user_attrs["hocket:error"] for trial in failed)
