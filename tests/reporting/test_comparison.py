import json
import math
from dataclasses import fields, replace

import pytest

from hocket.errors import InputError
from hocket.reporting import Comparison, Sample

from .examples import example

PLAIN = Comparison(
    target="mlp",
    device="cpu",
    cores=2,
    ops=7,
    eager_ms=Sample.of([12.3, 12.3]),
    planned_ms=Sample.of([10.0, 10.0]),
    lower_bound_ms=9.5,
    efficiency=0.71,
    speedup=1.23,
    verdict="planned",
    why="measured",
    max_abs_diff=0.0,
    bitwise=True,
)


def test_sample_is_worked_by_hand() -> None:
    sample = Sample.of([5.0, 1.0, 2.0, 4.0, 3.0, 10.0])
    assert sample == Sample(lower_quartile=2.0, median=3.5, min=1.0, p90=7.5, runs=6)
    assert Sample.of([2.0]) == Sample(2.0, 2.0, 2.0, 2.0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda values=values: Sample.of(values), "sample: expected")
            for values in ([], [math.nan], [-1.0], [math.inf])
        ),
        (lambda: Sample(1.0, 1.0, 2.0, 3.0, 1), "min <= lower quartile <= median <= p90"),
        (lambda: Sample(1.0, 1.0, 1.0, 1.0, 0), "at least one run"),
        (lambda: replace(PLAIN, verdict="fast"), "verdict"),
    ],
)
def test_values_that_no_run_gives_are_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_json_has_the_promised_keys() -> None:
    document = PLAIN.to_json()
    assert list(document) == ["format", *(each.name for each in fields(Comparison)), "result", "headline"]
    for key in ("eager_ms", "planned_ms"):
        assert set(document[key]) == {"lower_quartile", "median", "min", "p90", "runs"}
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_what_is_not_finite_becomes_null() -> None:
    broken = replace(
        PLAIN, lower_bound_ms=math.nan, efficiency=math.inf, speedup=math.nan, max_abs_diff=math.nan, bitwise=False
    )
    document = broken.to_json()
    json.dumps(document, allow_nan=False)
    assert all(document[key] is None for key in ("lower_bound_ms", "efficiency", "speedup", "max_abs_diff"))
    assert document["result"] == "max difference nan"
    assert document["headline"] == "speed not compared, max difference nan"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "1.23x faster than eager, same result bitwise; 1.05x of the bound of 9.5 ms"),
        ({"lower_bound_ms": None}, "1.23x faster than eager, same result bitwise"),
        (
            {"lower_bound_ms": None, "bitwise": False, "max_abs_diff": 3.1e-7},
            "1.23x faster than eager, max difference 3.1e-07",
        ),
        (
            {"lower_bound_ms": None, "bitwise": False, "max_abs_diff": None},
            "1.23x faster than eager, result not compared",
        ),
        (
            {"lower_bound_ms": None, "speedup": 0.8, "verdict": "eager"},
            "eager kept: the plan is 1.25x slower than eager, same result bitwise",
        ),
        (
            {"lower_bound_ms": None, "speedup": 1.0, "verdict": "eager", "ops": 0},
            "eager kept: no plan was made, same result bitwise",
        ),
        ({"lower_bound_ms": None, "speedup": 1.001}, "as fast as eager, same result bitwise"),
    ],
)
def test_headline(changed: dict[str, object], expected: str) -> None:
    assert replace(PLAIN, **changed).headline == expected  # type: ignore[arg-type]


def test_the_file_holds_the_json(tmp_path) -> None:
    comparison = example().comparison
    comparison.save(tmp_path / "comparison.json")
    assert json.loads((tmp_path / "comparison.json").read_text()) == comparison.to_json()
