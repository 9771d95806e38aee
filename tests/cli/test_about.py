"""hocket --version --json, and hocket completion."""

import platform
import shutil
import subprocess
import sys

import pytest

from hocket import __version__

from .conftest import TINY


def test_version_is_one_line_or_all_that_a_bug_report_needs(hocket):
    assert hocket("--version").out == f"hocket {__version__}\n"
    for words in (("--version", "--json"), ("--json", "--version")):
        found = hocket(*words).fine()
        assert found.json.keys() == {"hocket", "python", "torch", "system", "processor", "cores", "compiler"}
        assert (found.json["hocket"], found.json["python"]) == (__version__, platform.python_version())
    found = hocket("--json")
    found.refused(2, "--json: only with --version")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_its_shell(hocket, shell):
    found = hocket("completion", shell)
    assert (found.status, found.err) == (0, "")
    assert "--planner" in found.out
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=found.out, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "offered"), [(("hocket", "comp"), "completion"), (("hocket", "run", "mlp", "--plann"), "--planner")]
)
def test_bash_completes_verbs_and_options(hocket, typed, offered):
    line = f"COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _hocket; echo ${{COMPREPLY[@]}}"
    script = f"{hocket('completion', 'bash').out}\n{line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [offered]


def test_a_terminal_shows_the_outcome_above_the_figures(hocket, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    found = hocket("run", *TINY, "--runs", 1).fine()
    first, why = found.out.splitlines()[:2]
    assert "eager" in first
    assert why.startswith("verdict ")
