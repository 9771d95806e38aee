"""The bench of the compiling process, and of steps beside it."""

from __future__ import annotations

import pytest

from benchmarks import compiling
from hocket import native, zoo
from hocket.errors import InputError
from hocket.ir import Machine
from hocket.tracing.compiling.request import request_of


def test_what_is_compiled_is_the_step_with_its_fused_update():
    job = zoo.load("mlp", depth=2, width=8)
    document = request_of(compiling._to_compile(job), threads=1).document
    assert document["calls"]
    assert {call["op"] for call in document["updates"]} == {"aten._fused_sgd_.default"}


def test_an_unknown_target_is_named():
    with pytest.raises(InputError, match="unheard-of"):
        compiling.measure("unheard-of/4")


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=native.available().why)
def test_steps_beside_the_compiler_and_alone_are_of_one_run():
    saved = []
    found = compiling.run(("digits-cnn/8",), saved.append)
    row = found["targets"]["digits-cnn/8"]
    assert row["over_eager"] == row["beside_ms"] / row["eager_ms"]
    assert 0 <= row["nice"] <= 19
    assert row["slowdown"] > 0
    assert row["turns"] > 1
    assert 0 < row["compile_cores"] <= Machine.here().cores
    assert row["cached_s"] > 0
    assert row["compile_s"] > compiling.TURN_S
    assert row["within"] is (row["mean_over_eager"] <= compiling.BAR)
    assert saved
