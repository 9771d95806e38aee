"""Verdicts outlive their process: the next one begins with them, without a search and without turns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from dynamo.remembering import OUTCOMES, trained
from hocket.autotune import comparison
from hocket.autotune.variant import Variant
from hocket.dynamo import region
from support.regions import made_regions

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
NOTHING_DONE = {"search_again": 0, "speedup_of": 0}


def _by_process(outcome: str, folder: str) -> dict[str, Any]:
    done = forked.run("import runpy\nrunpy.run_module('dynamo.remembering', run_name='__main__')", outcome, folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome != "unclear"])
def test_a_final_verdict_is_recalled(outcome: str, tmp_path: Path) -> None:
    first, second = trained(outcome, str(tmp_path)), trained(outcome, str(tmp_path))
    assert first["counts"]["search_again"] >= (outcome != "other bits")
    assert first["counts"]["speedup_of"] == (outcome in ("faster", "slower"))
    assert second["counts"] == NOTHING_DONE
    assert second["bits"] == first["bits"]
    assert any("remembered" in line for line in second["log"])
    assert bool(second["reasons"]) == (outcome == "faster")


def test_what_load_left_open_is_searched_again(tmp_path: Path) -> None:
    first, second = trained("unclear", str(tmp_path)), trained("unclear", str(tmp_path))
    assert first["counts"]["speedup_of"] == second["counts"]["speedup_of"] == comparison.MAX_ATTEMPTS
    assert second["counts"]["search_again"] == 0  # the regions' own decisions were clear


def test_another_process_recalls(tmp_path: Path) -> None:
    first, second = _by_process("faster", str(tmp_path)), _by_process("faster", str(tmp_path))
    assert first["counts"]["speedup_of"] == 1
    assert second["counts"] == NOTHING_DONE
    assert second["bits"] == first["bits"]


def test_a_region_that_has_drifted_is_not_recalled(tmp_path: Path) -> None:
    drifted: list[str] = []
    run = torch.compile(lambda x: x.exp().sin().cos(), backend="hocket", options={"cache": tmp_path})
    with made_regions() as made:
        for _ in range(30):
            run(torch.ones(4, 4))
        assert [each.verdict for each in made] == ["planned"]
        made[0].on_drift = lambda: drifted.append("")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Variant, "has_drifted", property(lambda self: not drifted))
            patch.setattr(region, "MAX_FAST", 5)
            for _ in range(150):
                run(torch.ones(4, 4))
        assert drifted == [""]
        assert [each.verdict for each in made] == ["planned"]
        assert "remembered" not in made[0].why
