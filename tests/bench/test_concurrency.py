"""The bench of every way to run a step: its targets, and the table of its result.

And those of promises and of compiling.
"""

import pytest

import forked
from benchmarks import compiling, concurrency, promises
from benchmarks.cli import main
from benchmarks.contenders import compared, eager_step
from hocket import native, zoo
from hocket.errors import InputError
from hocket.ir import Machine
from hocket.tracing.compiling.request import request_of
from support.refusals import refused


def test_a_target_that_it_does_not_have_is_named_before_anything_is_measured():
    with pytest.raises(InputError, match=r"expected some of bert-tiny, dcgan, .*resnet20, .*, got 'lenet'"):
        concurrency.run(("mlp", "lenet"))


def test_the_table_has_a_row_for_each_target_and_a_dash_for_what_was_left_out(monkeypatch, capsys):
    asked = {}
    speedup = dict.fromkeys(("compile", "all", "close"), 1.25)

    def measured(target, *settings):
        asked[target] = settings
        return {"speedup": speedup}

    monkeypatch.setattr(concurrency, "measure", measured)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["concurrency", "resnet20", "lenet/3", "--no-compile", "--close", "--rounds", "2"]) == 0
    assert asked["resnet20/4"] == (False, False, 2, 8)
    assert asked["resnet20/64"] == asked["lenet/3"] == (False, False, 2, 2)
    words = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("resnet20", "lenet"))]
    assert [line[0] for line in words] == ["resnet20/4", "resnet20/64", "lenet/3"]
    assert words[0][1:] == ["1.25", "-", "-", "-", "-", "1.25", "-", "1.25", "-", "-"]


def tiny(target):
    return zoo.load(target, depth=2, width=8)


def refusing(job):
    return None, {"failed": f"{job.name} cannot be compiled"}


def test_a_contender_that_fails_says_why_and_the_others_are_timed(monkeypatch):
    forked.in_place_of_spawn(monkeypatch)
    row = compared({"eager": (eager_step,), "other": (refusing,)}, tiny, "mlp", rounds=2, block=3)
    assert row["said"] == {"other": {"failed": "mlp cannot be compiled"}}
    assert row["contenders"]["eager"]["steps"] == 6
    assert row["speedup"] == {"eager": 1.0}


@pytest.mark.parametrize("bench", [promises, compiling])
def test_an_unknown_target_is_named(bench) -> None:
    refused("unheard-of", bench.measure, "unheard-of/4")


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


def test_what_is_compiled_is_the_step_with_its_fused_update():
    job = zoo.load("mlp", depth=2, width=8)
    document = request_of(compiling._to_compile(job), threads=1).document
    assert document["calls"]
    assert {call["op"] for call in document["updates"]} == {"aten._fused_sgd_.default"}


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
