"""The bench that holds the verdict's speedup against what the next steps have."""

from __future__ import annotations

import pytest

from benchmarks import promises
from hocket.errors import InputError


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(InputError, match="unheard-of"):
        promises.measure("unheard-of/4")


@pytest.mark.slow
def test_a_run_has_what_was_promised_and_what_was_met() -> None:
    saved: list[dict[str, object]] = []
    found = promises.run(("mlp",), 1, ("after",), saved.append)
    row = found["targets"]["mlp"]["after"]
    (only,) = row["runs"]
    assert row["kept"] == only["kept"]
    if only["verdict"] == "planned":
        assert only["kept"] is (only["met"] >= only["low"])
    else:
        assert only["met"] is None
    assert saved
