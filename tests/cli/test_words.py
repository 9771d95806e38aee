"""Wrong words and failures, and their ends: the exit status, one clear line, and no half-written file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.cli import main
from hocket.cli.arguments import Verb, make_parser_of, run_command
from hocket.ir import Timeline

from .conftest import TINY, line_of

VERBS = (
    "run",
    "capture",
    "profile",
    "plan",
    "check",
    "simulate",
    "bounds",
    "report",
    "machine",
    "zoo",
    "partition",
    "completion",
)


def test_alone_it_prints_its_help(hocket):
    found = hocket().fine()
    assert found.out.startswith("usage: hocket ")
    assert all(f"\n    {verb} " in found.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(hocket, verb):
    found = hocket(verb, "--help").fine()
    assert f"example:\n  hocket {verb}" in found.out
    assert "--format {table,json}" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "invalid choice: 'nosuch'"),
        (("bench",), "invalid choice: 'bench'"),
        (("run",), "TARGET"),
        (("run", "mlp", "--nosuch"), "--nosuch"),
        (("run", "mlp", "--plan", "list"), "--plan"),
        (("run", "mlp", "--format", "xml"), "invalid choice: 'xml'"),
        (("run", "mlp", "--planner", "nosuch"), "invalid choice: 'nosuch'"),
        (("run", "mlp", "--runs", "0"), "--runs: expected a whole number of at least 1, got '0'"),
        (("run", "mlp", "--threads", "100000"), "--threads: this machine has"),
        (("run", "mlp", "--set", "width"), "expected KEY=VALUE, such as image_size=64, got 'width'"),
        (("run", "nosuch"), "no zoo entry is called 'nosuch'"),
        (("run", "mpl"), "did you mean mlp?"),
        (("run", "mlp", "--optimizer", "lion"), "expected one of sgd, adam, adamw, got 'lion'"),
        (("run", "mlp", "--set", "image_size=8"), "--set image_size: no such setting; it takes depth, width"),
        (("run", "mlp", "--set", "width=wide"), "width: expected a whole number of at least 1, got 'wide'"),
        (("run", "mlp", "--set", "width=1.5"), "got 1.5"),
        (("run", "nosuch.py:job"), "no such file: nosuch.py"),
        (("run", "train.txt:job"), "expected a zoo entry or file.py:function"),
        (("capture", "mlp"), "-o/--output"),
        (("profile", "mlp", "-o", "c.json", "--widths", "1,x"), "expected a whole number of at least 1, got 'x'"),
        (("profile", "mlp", "-o", "c.json", "--widths", "1,9999"), "--widths: this machine has"),
        (("plan", "nosuch.json", "nosuch.json"), "argument GRAPH: no such file: nosuch.json"),
        (("check", ".", "plan.txt"), "argument GRAPH: expected a file, got the directory ."),
    ],
)
def test_wrong_words_are_named_with_status_2(hocket, tmp_path, words, message):
    found = hocket(*words)
    found.refused(2, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--machine", "nosuch.json"), ("--planner", "nosuch"), ("--lanes", "0")])
def test_wrong_options_of_plan(hocket, made, words):
    found = hocket("plan", made["graph"], made["costs"], *words)
    found.refused(2, words[0])


def test_an_option_of_another_planner(hocket, made):
    found = hocket("plan", made["graph"], made["costs"], "--planner", "serial", "--lanes", 1)
    assert (found.status, found.err) == (2, "hocket: error: --lanes is no option of the planner serial\n")


NAMES = (
    "linear, uneven, instead, printing, drawing, branching, counting, failing, interrupted, raising, leaving, refused, "
    "nothing, needing"
)


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("train.py", 2, f"train.py: expected file.py:function; functions there: {NAMES}"),
        ("train.py:", 2, f"train.py:: expected file.py:function; functions there: {NAMES}"),
        ("train.py:nosuch", 2, f"train.py has no function 'nosuch'; functions there: {NAMES}"),
        ("train.py:NUMBER", 2, "train.py:NUMBER is no function but a value of type int"),
        ("train.py:needing", 2, "train.py:needing: expected a function without arguments, it needs width"),
        ("sizes.py:job", 2, "sizes.py has no function 'job'; there is no function there"),
        (
            "train.py:nothing",
            1,
            "train.py:nothing: expected it to return hocket.Job(step, model, optimizer, batches), got None",
        ),
        (
            "train.py:raising",
            1,
            f"train.py:raising: the function failed (train.py, line {line_of('1 / 0')}): ZeroDivisionError: ",
        ),
        (
            "train.py:leaving",
            1,
            f"train.py:leaving: the function failed (train.py, line {line_of('SystemExit(3)')}): it called sys.exit(3)",
        ),
        (
            "train.py:refused",
            1,
            f"train.py:refused: the function failed (train.py, line {line_of('job.optimizer, [])')}): Job.batches: ",
        ),
        (
            "train.py:failing",
            1,
            f"train.py:failing: the step failed (train.py, line {line_of('ValueError(')}): ValueError: a batch gone",
        ),
    ],
)
def test_targets_that_are_no_job(hocket, steps, target, status, message):
    found = hocket("run", target)
    assert (found.status, found.out) == (status, "")
    assert found.error.startswith(f"hocket: error: {message}")


@pytest.mark.parametrize("words", [("--set", f"width={10**11}"), ("--batch-size", 10**20)])
def test_sizes_for_which_there_is_no_memory(hocket, words):
    found = hocket("explain", "mlp", *words)
    assert found.status == 1
    assert found.error.startswith("hocket: error: mlp: building it failed (--traceback shows where): ")
    assert "frame #" not in found.error


@pytest.mark.parametrize("words", [("--batch-size", 2), ("--optimizer", "sgd"), ("--seed", 0), ("--set", "width=2")])
def test_options_of_the_zoo_are_not_for_files(hocket, steps, words):
    found = hocket("run", "train.py:linear", *words)
    assert found.status == 2
    assert found.error.endswith(f"{words[0]} is for zoo entries; here the function decides")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport no_such_module\n", "(bad.py, line 2): ModuleNotFoundError: No module named 'no_such_module'"),
        ("def job(:\n", "(bad.py, line 1): SyntaxError: invalid syntax"),
        ("import sys\n\nsys.exit()\n", "(bad.py, line 3): it called sys.exit(None)"),
        (
            "from .net import Net\n",
            "(bad.py, line 1): ImportError: attempted relative import with no known parent package; write the function "
            "into a file beside the package, which imports from it by name",
        ),
        (
            "class Own(Exception):\n    def __str__(self):\n        raise RuntimeError\n\n\nraise Own\n",
            "(bad.py, line 6): Own",
        ),
        ("raise ValueError('\\x1b[31mred')\n", "(bad.py, line 1): ValueError: \ufffd[31mred"),
    ],
)
def test_a_file_that_cannot_be_imported(hocket, tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    found = hocket("capture", "bad.py:job", "-o", "graph.json")
    assert found.status == 1
    assert found.err == f"hocket: error: bad.py:job: importing it failed {message}\n"
    assert not (tmp_path / "graph.json").exists()


def test_a_file_may_be_called_like_a_module(hocket, tmp_path):
    (tmp_path / "json.py").write_text("def job():\n    pass\n")
    assert hocket("run", "json.py:job").error.endswith("got None")
    import json

    assert json.loads("1") == 1


def test_traceback_only_when_asked_for(hocket, steps, capsys):
    assert main(["run", "train.py:failing", "--traceback"]) == 1
    err = capsys.readouterr().err
    assert 'raise ValueError("a batch' in err
    assert err.splitlines()[-1].startswith("hocket: error: train.py:failing: the step failed")


def test_interrupted(hocket, steps):
    found = hocket("run", "train.py:interrupted")
    assert (found.status, found.out) == (130, "")
    assert found.error == "hocket: interrupted"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/x.json", "no/x.json: there is no directory no to write into"),
        ("folder", "folder: expected a file to write, it is a directory"),
        (os.devnull, f"{os.devnull}: expected a file to write, it is not a regular file"),
    ],
)
def test_outputs_are_looked_at_before_the_work(hocket, made, tmp_path, output, message):
    (tmp_path / "folder").mkdir()
    for words in (
        ("capture", "nosuch"),
        ("profile", "nosuch"),
        ("plan", made["graph"], made["graph"]),
        ("simulate", made["graph"], made["plan"], made["graph"]),
        ("machine",),
    ):
        found = hocket(*words, "-o", output)
        assert (found.status, found.err) == (1, f"hocket: error: {message}\n")


def test_a_report_does_not_go_into_a_file(hocket, made, tmp_path):
    for folder in ("plan.txt", "plan.txt/below"):
        for words in (("run", "nosuch", "--report"), ("report", made["graph"], made["plan"], made["costs"], "-o")):
            found = hocket(*words, folder)
            assert found.status == 1
            assert found.error == f"hocket: error: {folder}: expected a directory to write into, plan.txt is a file"


def test_what_cannot_be_read_is_named(hocket, made, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for words, message in (
        (("check", made["costs"], made["plan"]), 'costs.json: format: expected "hocket-graph/1"'),
        (("check", made["graph"], made["costs"]), "costs.json: line 1: expected 'hocket-plan/1'"),
        (("check", made["graph"], "bytes"), "bytes: not a plan"),
        (("bounds", made["graph"], "bytes"), "bytes: not JSON"),
        (("plan", made["graph"], made["costs"], "--machine", made["costs"]), "costs.json: format: expected"),
    ):
        found = hocket(*words)
        assert (found.status, found.out) == (1, "")
        assert found.error.startswith(f"hocket: error: {message}")


def test_what_fails_leaves_older_files_as_they_were(hocket, made, steps, tmp_path):
    (tmp_path / "short.json").write_text('{"format": "hocket-costs/1", "durations_us": {}}')
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()}
    for words in (
        ("plan", made["graph"], "short.json", "-o", made["plan"]),
        ("simulate", made["graph"], made["plan"], "short.json", "-o", "t.json", "--trace", "trace.json"),
        ("report", made["graph"], made["plan"], "short.json", "-o", "report"),
        ("capture", "train.py:failing", "-o", made["graph"]),
        ("profile", "train.py:failing", "-o", made["costs"], "--graph", made["graph"]),
        ("run", "train.py:failing", "--report", "report"),
    ):
        assert hocket(*words).status == 1
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()} == before
    assert not (tmp_path / "report").exists()


def test_what_needs_no_torch_does_not_load_it(made):
    words = [
        ["machine", "-o", "m.json"],
        ["plan", "graph.json", "costs.json", "-o", "p.txt"],
        ["check", "graph.json", "p.txt", "--machine", "m.json"],
        ["simulate", "graph.json", "p.txt", "costs.json", "-o", "t.json", "--trace", "trace.json"],
        ["bounds", "graph.json", "costs.json"],
        ["report", "graph.json", "p.txt", "costs.json", "t.json", "-o", "report"],
        ["run", "--help"],
        ["plan", "nosuch", "nosuch"],
    ]
    program = (
        "import sys; from hocket.cli import main\n"
        f"print([main(words) for words in {words}], file=sys.stderr)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 2]"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "graph.json", "costs.json"),
        ("bounds", "graph.json", "costs.json"),
        ("machine", "--format", "json"),
        ("zoo",),
    ],
)
def test_a_reader_who_leaves_is_no_traceback(made, words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hocket", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_a_closed_stdout_takes_nothing_from_the_files(made):
    command = 'exec "$0" -W error -m hocket simulate graph.json plan.txt costs.json -o t.json >&- 2>&- <&-'
    assert subprocess.run(["sh", "-c", command, sys.executable], check=False).returncode == 0
    assert Timeline.load("t.json").spans


@pytest.mark.parametrize(
    "words",
    [
        ("profile", *TINY, "-o", "two.json", "--graph", "./two.json"),
        ("simulate", "graph.json", "plan.txt", "costs.json", "-o", "two.json", "--trace", "two.json"),
    ],
)
def test_two_results_do_not_go_into_one_file(hocket, made, words):
    found = hocket(*words)
    assert (found.status, found.error) == (2, "hocket: error: two.json: expected two files to write, got one twice")
    assert not Path("two.json").exists()


def test_an_exit_of_the_work_keeps_its_status():
    verb = Verb("leave", lambda _: sys.exit(143), "leave", "hocket leave")
    with pytest.raises(SystemExit) as leaving:
        run_command(make_parser_of([verb], prog="hocket", description="", epilog=""), ["leave"])
    assert leaving.value.code == 143


def test_options_may_stand_between_the_files(hocket, made, tmp_path):
    hocket("simulate", made["graph"], made["plan"], made["costs"], "-o", "t.json")
    for number, words in enumerate(
        [
            (made["graph"], made["plan"], made["costs"], "--machine", made["machine"], "-o", "0", "t.json"),
            ("-o", "1", made["graph"], made["plan"], "--title", "x", made["costs"], "t.json", "t.json"),
        ]
    ):
        found = hocket("report", *words)
        assert (found.status, found.out) == (0, f"report: {number}/index.html\n")
        assert len(list((tmp_path / str(number)).glob("timeline-*.json"))) == 1 + number
    assert (
        "unrecognized arguments: more"
        in hocket("bounds", made["graph"], "--format", "json", made["costs"], "more").error
    )


def test_an_error_is_one_line_of_a_page_at_most(hocket, made):
    made["graph"].write_text(made["graph"].read_text().replace('"name": "', f'"name": "{"x y" * 10_000}', 1))
    found = hocket("bounds", made["graph"], made["costs"])
    assert found.status == 1
    assert len(found.err.splitlines()) == 1
    assert len(found.error) < 1100


def test_tiny_target_is_what_the_other_tests_take_it_for(hocket):
    assert hocket("capture", *TINY, "-o", "g.json", "--format", "json").json["ops"] < 100
