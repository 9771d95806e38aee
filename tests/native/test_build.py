"""The line of a failed build that says why it failed."""

import pytest

from hocket.native import build

COMMAND = "c++ -MMD -DTORCH_EXTENSION_NAME=core -Werror -I/opt/errors/include -c core.cpp -o core.o"
BEGINNING = f"Error building extension 'core': [1/9] {COMMAND}\nFAILED: core.o\n{COMMAND}\n"
FAILURES = {
    "a mistake": (
        BEGINNING
        + "/a/folder/core.cpp: In function 'int f()':\n/a/folder/core.cpp:2:18: error: 'nope' was not declared",
        "core.cpp:2:18: error: 'nope' was not declared",
    ),
    "no memory": (
        BEGINNING + "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
        "c++: fatal error: Killed signal terminated program cc1plus",
    ),
    "killed by the shell": (BEGINNING + "/bin/sh: line 1: 17 Killed", "sh: line 1: 17 Killed"),
    "a full disk": (
        BEGINNING + "/tmp/cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device",
        "cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device",
    ),
    "something else": ("\nninja is broken\nmore of it", "ninja is broken"),
    "nothing": ("", "RuntimeError"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_line_of_the_error_is_shown_and_no_command(kind, monkeypatch):
    output, line = FAILURES[kind]

    def fails():
        raise RuntimeError(output)

    monkeypatch.setattr(build, "load", fails)
    found = build.available.__wrapped__()
    assert not found
    assert found.why == f"native lanes could not be built ({line}); Python lanes are used"


def test_a_long_line_is_cut():
    why = build.cause(RuntimeError(BEGINNING + "core.cpp:1:1: error: " + "no matching function " * 100))
    assert why.startswith("core.cpp:1:1: error: no matching")
    assert len(why) <= 200


def test_every_source_is_compiled():
    assert sorted(build._SOURCES) == sorted(build._FOLDER.glob("*.cpp"))
