"""The progress bar: only on a terminal, only for long work, and gone when it is over."""

import io
import sys
import threading
from contextlib import redirect_stderr

import pytest

from hocket.cli import console
from hocket.cli.console import Bar, prepare_streams, print_tables, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_short_work_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 1000)
    before = threading.active_count()
    with redirect_stderr(terminal), Bar("work") as bar:
        bar.update("more work", 1, 2)
    assert terminal.getvalue() == ""
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("moving", [False, True])
def test_long_work_shows_what_is_done(terminal, monkeypatch, moving):
    monkeypatch.setattr(console, "PATIENCE_S", 0)
    with redirect_stderr(terminal), Bar("work", moving=moving) as bar:
        bar._timer.join()
        assert "work" in terminal.getvalue()
        bar.update("more work", 1, 2)
        assert "more work" in terminal.getvalue()
        assert "50%" in terminal.getvalue()
    seen = terminal.getvalue()
    bar.update("late", 2, 2)
    bar._appear()
    assert terminal.getvalue() == seen, "nothing is painted once the work is over"


def test_no_bar_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0)
    quiet = io.StringIO()
    with redirect_stderr(quiet), Bar("work") as bar:
        bar.update("more work", 1, 2)
        assert not bar._timer.is_alive()
    assert quiet.getvalue() == ""


def test_an_error_takes_the_bar_away(terminal, monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0)

    def fail():
        with redirect_stderr(terminal), Bar("work") as bar:
            bar._timer.join()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line of the bar is wiped"


def test_streams_that_are_closed_take_what_is_written(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    prepare_streams()
    print("out")
    print("err", file=sys.stderr)
    sys.stdout.flush()


def test_what_a_stream_cannot_encode_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    prepare_streams()
    print_tables("written: caf\u00e9/\udcff.json")
    sys.stdout.flush()
    assert written.getvalue() == b"written: caf\\xe9/\\udcff.json\n"


@pytest.mark.parametrize("columns", [1, 7, 12])
def test_a_narrow_terminal_folds_what_a_wider_one_shows(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_tables(table("three plans", ("name", "takes", "lanes"), [("serial", "12.5 ms", "2")]))
    assert {"serial", "12.5 ms", "2"} <= set(
        capsys.readouterr().out.replace("  ", "\n").replace(" \n", "\n").split("\n")
    )


def test_a_table_of_facts_has_no_empty_head(capsys):
    print_tables(table("the job", ("", ""), [("steps", "3")]))
    assert [line.split() for line in capsys.readouterr().out.splitlines() if line] == [["the", "job"], ["steps", "3"]]
