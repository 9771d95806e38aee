"""The bench of every way to run a step: its targets, and the table of its result."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import commands, concurrency
from hocket.errors import InputError


def test_a_target_that_it_does_not_have_is_named_before_anything_is_measured():
    with pytest.raises(InputError, match=r"expected some of bert-tiny, dcgan, .*resnet20/64.*, got 'lenet'"):
        concurrency.run(targets=("mlp", "lenet"))


def test_a_large_target_is_measured_with_another_batch(monkeypatch):
    measured = []
    row = {"scheduled": "all", "speedup": {"all": 2.0}, "to_bound": {"all": 1.0}}
    monkeypatch.setattr(concurrency, "measure", lambda name, size, **_: measured.append((name, size)) or row)
    found = concurrency.run(targets=("resnet20/64", "mlp", "resnet50/2"))
    assert measured == [("mlp", {}), ("resnet20", {"batch_size": 64}), ("resnet50", {"batch_size": 2})]
    assert list(found["large"]) == ["resnet20/64", "resnet50/2"]
    for wrong in ("resnet50/0", "resnet50/", "mlp/2", "resnet50/x"):
        with pytest.raises(InputError, match=f"got '{wrong}'"):
            concurrency.run(targets=(wrong,))


def test_without_single_plans_their_table_has_dashes(monkeypatch, capsys):
    row = {"speedup": {"compile_autotune": 1.5, "all": 2.0}, "uniform_best": None, "to_bound": {}, "faults_to_eager": 0}
    asked = {}
    monkeypatch.setattr(
        concurrency,
        "run",
        lambda **given: asked.update(given) or {"cores": 2, "torch": "2", "small": {"mlp": row}, "large": {}},
    )
    monkeypatch.setenv("COLUMNS", "200")
    given = Namespace(quick=True, no_compile=False, no_plans=True, close=False, rounds=2, target=["mlp"])
    given.report = given.output = None
    given.format = "table"
    commands.concurrency_bench(given)
    assert (asked["planned"], asked["compiled"], asked["bitwise"], asked["rounds"]) == (False, True, True, 2)
    words = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mlp")]
    assert words[0][5:7] == ["1.50", "2.00"]
    assert set(words[1][1:]) == {"-"}


def test_the_tables_have_a_row_for_each_target_and_a_dash_for_what_was_left_out(monkeypatch, capsys):
    speedup = dict.fromkeys(("compile", "all", "close", *commands.PLANS), 1.25) | {"uniform_2x1": 1.5}
    row = {"speedup": speedup, "uniform_best": "uniform_2x1", "to_bound": {}, "faults_to_eager": 0.5}
    found = {"cores": 2, "torch": "2", "small": {"mlp": row}, "large": {}}
    monkeypatch.setattr(concurrency, "run", lambda **_: found)
    monkeypatch.setenv("COLUMNS", "200")
    given = Namespace(
        quick=True,
        no_compile=True,
        no_plans=False,
        close=True,
        rounds=None,
        target=[],
        report=None,
        output=None,
        format="table",
    )
    commands.concurrency_bench(given)
    words = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mlp")]
    assert words[0] == ["mlp", "1.25", "-", "-", "-", "-", "1.25", "1.25", "-", "-", "-", "50.0%"]
    assert words[1] == ["mlp", *["1.25"] * len(commands.PLANS), "1.50"]
