import pytest

from benchmarks.transfers import run


def test_a_small_run():
    result = run(("alexnet",), workers=8, image_size=64)
    rows = result["models"]
    assert [row["batch_factor"] for row in rows] == [0.5, 1.0, 2.0]
    half, whole, twice = (row["communication_to_computation"] for row in rows)
    assert whole == pytest.approx(1.0)
    assert 1.0 < half < 2.0  # some of the computation is by weights, not by images
    assert 0.5 < twice < 1.0
    for row in rows:
        assert row["recvs"] == 16
        assert row["orders"]["auto"]["step_us"] <= min(row["orders"][order]["step_us"] for order in ("layer", "tac"))
        assert row["cluster"]["tac"]["straggler_share"] == 0.0
