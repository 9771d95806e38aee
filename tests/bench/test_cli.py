"""The command line of the benchmarks, in this process and as ``python -m benchmarks``."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.cli import VERBS, main
from cli.conftest import outcome_of

ROOT = Path(__file__).parents[2]
NAMES = [verb.name for verb in VERBS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


@pytest.fixture
def bench(capsys, tmp_path, monkeypatch):
    """Runs a bench in an empty folder and 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")

    return partial(outcome_of, main, capsys)


def test_alone_it_lists_what_there_is(bench):
    found = bench().fine()
    assert found.out.startswith("usage: python -m benchmarks ")
    assert all(name in found.out.split() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_example(bench, name):
    found = bench(name, "--help").fine()
    assert f"python -m benchmarks {name}" in found.out.partition("example:\n  ")[2]
    assert "--format {table,json}" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "'nosuch' (choose from"),
        (("simulate", "--ops", "0"), "--ops: expected a whole number of at least 1, got '0'"),
        (("manycore", "--budget-s", "9"), "a simulation is as long as it is"),
        (("gpu", "--device", "sim"), "invalid choice: 'sim'"),
    ],
)
def test_wrong_words_are_named_with_status_2(bench, words, message):
    found = bench(*words)
    found.refused(2, message)


def test_what_fails_is_one_line_with_status_1(bench):
    found = bench("overhead", "nosuch")
    assert found.status == 1
    assert found.error.startswith("python -m benchmarks: error: no zoo entry is called 'nosuch'")


def test_simulate(bench):
    words = ("simulate", "--ops", 50)
    assert bench(*words).out.startswith("simulate 50 ops on 8 lanes, medians of 3 rounds")
    told = bench(*words, "--format", "json").json
    assert told["bench"] == "simulate"
    assert told["questions"]["first"]["ratio"]["median"] > 0


def test_manycore(bench, monkeypatch):
    from benchmarks import manycore

    monkeypatch.setattr(manycore, "TARGETS", {"mlp": {"width": 16, "depth": 2, "batch_size": 4}})
    monkeypatch.setattr(manycore, "QUICK", ("mlp",))
    told = bench("manycore", "--quick", "--format", "json").json
    assert told["bench"] == "manycore"
    assert list(told["machines"]) == ["68", "16"]
    found = bench("manycore", "--quick")
    assert "68 cores, simulated on published curves: speedup over recommended" in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    assert f"{told['machines']['16']['mean']['uniform']:.2f}" in found.out


def test_manycore_measured_takes_more_than_two_cores(bench, monkeypatch):
    from benchmarks import manycore

    monkeypatch.setattr(manycore, "FEWEST_CORES", 1000)
    found = bench("manycore", "--measured")
    found.refused(1, "with --measured it takes more than 2")


@pytest.mark.parametrize("words", [(), ("gpu", "--help")])
def test_it_runs_from_the_root_of_the_repository(words):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONPATH": "src:."},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: python -m benchmarks ")


def test_hocket_does_not_import_the_benchmarks():
    program = "import sys, hocket, hocket.cli.parser\nassert not [m for m in sys.modules if m.startswith('benchmarks')]"
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
