"""Every file of examples/ runs, with few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

import forked

FOLDER = Path(__file__).parents[1] / "examples"
# Words after the name on the command line.
FEW = {
    "digits_cnn": "20",
    "edited_plan": "12",
    "ensemble": "20",
    "gan": "30",
    "load_and_run": "3 64",
    "lstm_hidden": "10",
    "nano_gpt": "8",
    "optuna_search": "4 2",
    "reinforcement": "30",
    "simulated_machine": "4 3",
    "with_accelerate": "20",
    "with_fabric": "20",
    "with_lightning": "20",
    "with_transformers": "12",
}
RANKS = {"ddp": (2, "20"), "parameter_server": (3, "10"), "pipeline_skips": (2, "10")}
# It needs Ray; tests/search/test_ray.py has it.
ELSEWHERE = {"tune_on_ray"}


def test_each_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == FEW.keys() | RANKS.keys() | ELSEWHERE


@pytest.mark.slow
def test_examples_are_typed_by_what_the_package_ships(tmp_path: Path) -> None:
    # An untyped call is one into torch, and what comes back from there is Any.
    options = ["--strict", "--ignore-missing-imports", "--allow-untyped-calls", "--no-warn-return-any"]
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", *options, str(FOLDER)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


# tests/dynamo/test_frameworks.py compares other trainers with a compiled model to eager.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("with_") else []) for name in FEW]
)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(FOLDER / f"{name}.py"), *FEW[name].split()]
    done = forked.run(f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_path({words[0]!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_an_example_runs_on_ranks(name: str, tmp_path: Path) -> None:
    num_ranks, steps = RANKS[name]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *words, str(FOLDER / f"{name}.py"), steps]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
