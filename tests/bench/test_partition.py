"""The bench of partitions, in small."""

from __future__ import annotations

import pytest

from benchmarks.partition import _summary, run
from benchmarks.partition.models import MODELS
from benchmarks.partition.paced import begins_of_layers, recorded
from benchmarks.partition.paced import run as run_paced
from benchmarks.partition.workloads import DYNAMIC_PROGRAMME
from hocket.errors import InputError


def test_the_heaviest_part_of_a_workload():
    saved = []
    result = run(("Layer-bert24_training",), parts=(), budget_s=0.5, save=saved.append)
    (row,) = result["load"].values()
    assert row["published"] == DYNAMIC_PROGRAMME["Layer-bert24_training"]
    assert 0 < row["hocket"] <= row["intervals"]
    assert saved == [result]


def test_only_who_keeps_the_balance_is_compared_with():
    def row(ours, metis, balanced, mtkahypar):
        found = {label: {"bytes": ours} for label in ("hocket", "alone", "acyclic")}
        return {**found, "metis": {"bytes": metis, "balanced": balanced}, "mtkahypar": mtkahypar}

    rows = [
        row(8.0, 4.0, False, {"bytes": 16.0, "balanced": True}),
        row(8.0, 4.0, True, {"bytes": 16.0, "balanced": True}),
        row(None, 4.0, True, {"bytes": 16.0, "balanced": True}),
        row(8.0, 4.0, False, {"bytes": 4.0, "balanced": False}),
    ]
    summary = _summary(rows)["hocket"]
    assert (summary["graphs"], summary["at_most"]) == (2, 0.5)
    assert summary["to_best"] == pytest.approx(1.0)
    assert summary["to_metis"] == 2.0


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_stages_of_equal_numbers_of_layers_begin_with_a_layer():
    layered = MODELS["unet"]()
    ops, chain = recorded(layered)
    begins = begins_of_layers(ops, chain, layered.layers, 3)  # three, three and two layers
    assert [ops[begin].name for begin in begins] == ["conv_transpose2d", "conv2d_4"]
    assert chain.forward_us[0] > 0
    assert chain.backward_us[0] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
def test_paced_ranks_run_both_splits():
    saved = []
    result = run_paced(("unet",), ranks=(2,), steps=1, save=saved.append)
    (row,) = result["rows"]
    assert saved == [result]
    assert result["paced"].startswith("computing is slept")
    for label in ("equal_layers", "hocket"):
        # Nobody is done before the slowest stage has worked on all micro-batches.
        assert row[label]["step_us"] >= result["micro_batches"] * 0.99 * max(row[label]["stages_us"])
    with pytest.raises(InputError, match="unknown model 'none'; one of gpt2"):
        run_paced(("none",))
