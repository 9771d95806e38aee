"""The bench of partitions, in small."""

import pytest

from benchmarks.partition import DYNAMIC_PROGRAMME, run
from benchmarks.partition.hog import run as run_beside_hog
from benchmarks.partition.paced import run as run_paced
from support.refusals import refused


def test_the_heaviest_part_of_a_workload():
    saved = []
    result = run(("Layer-bert24_training",), parts=(), search_s=0.5, save=saved.append)
    (row,) = result["load"].values()
    assert row["published"] == DYNAMIC_PROGRAMME["Layer-bert24_training"]
    assert 0 < row["hocket"] <= row["intervals"]
    assert saved == [result]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_paced_ranks_run_both_splits():
    saved = []
    result = run_paced(("unet",), parts=(2,), steps=1, save=saved.append)
    (row,) = result["rows"]
    assert saved == [result]
    assert result["paced"].startswith("computing is slept")
    for label in ("equal_layers", "hocket"):
        # No stage ends before the slowest one has worked on all micro-batches.
        assert row[label]["step_us"] >= result["micro_batches"] * 0.99 * max(row[label]["stages_us"])
    refused("expected some of gpt2, .*, got 'none'", run_paced, ("none",))


@pytest.mark.slow
def test_a_job_beside_a_hog():
    saved = []
    result = run_beside_hog(batch_size=8, branches=4, width=32, after=6, save=lambda found: saved.append(dict(found)))
    assert [set(each) >= {"moving"} for each in saved] == [False, True]
    assert result["fixed"]["migrations"] == []
    assert result["summary"]["steps_later"] == 6
    for label in ("fixed", "moving"):
        assert result[label]["hog_from"] == 30
        assert min(result[label]["steps_us"]) > 0
    assert all(len(shares) == 2 for step, shares in result["moving"]["looks"].items() if step > 5)
