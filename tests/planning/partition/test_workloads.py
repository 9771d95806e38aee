"""Max-load on the eight workloads: at most that of the best contiguous parts, and within the files' own limits."""

import numpy as np
import pytest

from benchmarks.partition import DYNAMIC_PROGRAMME, workload
from hocket.planning.partition import partitioned
from hocket.planning.partition.search import Wanted, keeps_limits


def workloads(quick: str) -> list:
    """All of them, but for one in slow tests only."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in DYNAMIC_PROGRAMME]


@pytest.mark.parametrize("name", workloads("Layer-bert24_training"))
def test_no_load_is_larger_than_the_dynamic_programmes(name):
    problem = workload(name)
    found = partitioned(problem, objective="load", budget_s=4.8, rounds=300 if "bert24" in name else 100_000)
    print(name, max(found.loads_us) / DYNAMIC_PROGRAMME[name])
    assert max(found.loads_us) <= DYNAMIC_PROGRAMME[name]
    assert keeps_limits(problem, Wanted("load", None), np.array(found.part))


@pytest.mark.parametrize("name", workloads("Layer-resnet50_inference"))
def test_no_load_without_a_cycle_is_larger_than_the_dynamic_programmes(name):
    problem = workload(name)
    found = partitioned(
        problem, objective="load", acyclic=True, budget_s=5.0, rounds=300 if "resnet50_inf" in name else 100_000
    )
    print(name, max(found.loads_us) / DYNAMIC_PROGRAMME[name])
    assert max(found.loads_us) <= DYNAMIC_PROGRAMME[name] * (1 + 1e-5)  # six digits are known
    assert found.cycle is None
