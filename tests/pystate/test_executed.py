"""Which code a step is said to run."""

from __future__ import annotations

import cProfile
import dis
import gc
import inspect
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hocket.errors import CaptureError
from hocket.pystate.bytecode import globals_of, with_nested
from hocket.pystate.executed import ExecutedCode
from hocket.pystate.kinds import reachable
from hocket.pystate.origins import origin
from hocket.pystate.watch import PurityWatch


class Cycle:
    """Garbage that only the collector finds, and that says so."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.finalized_at = time.perf_counter()


@pytest.fixture
def collections() -> Iterator[list[float]]:
    """The times of all collections, noted by a callback as tools for memory do."""
    noted: list[float] = []

    def note(phase: str, info: dict[str, int]) -> None:
        noted.append(time.perf_counter())

    gc.callbacks.append(note)
    yield noted
    gc.callbacks.remove(note)


def _allocate() -> int:
    return len([Cycle() for _ in range(10_000)])


def _collect() -> int:
    Cycle()
    gc.collect()
    return 0


@pytest.mark.parametrize("step", [_allocate, _collect])
def test_what_the_collector_runs_is_no_code_of_the_step(collections: list[float], step: Callable[[], int]) -> None:
    step()
    assert collections, "it runs the collector where nobody watches"
    executed = ExecutedCode()
    with executed.watching():
        step()
    assert not executed.world
    assert "finalized_at" not in executed.names
    assert gc.isenabled()


def test_code_after_a_collection_is_watched() -> None:
    def step() -> None:
        gc.collect()
        time.time()

    executed = ExecutedCode()
    with executed.watching():
        step()
    assert any("time" in asked for asked in executed.world)


def test_the_collector_stays_as_it_was() -> None:
    gc.disable()
    try:
        with ExecutedCode().watching():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_watch_within_another_and_within_a_profiler_in_python_sees_what_is_asked() -> None:
    outer, inner, seen = ExecutedCode(), ExecutedCode(), []
    sys.setprofile(lambda frame, event, argument: seen.append(argument))
    try:
        with outer.watching(), inner.watching():
            time.time()
    finally:
        sys.setprofile(None)
    assert list(outer.world) == list(inner.world) != []
    assert time.time in seen


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="several profilers see calls since Python 3.12")
def test_a_step_under_a_profiler_in_c_is_not_watched_and_not_run() -> None:
    def step(batch: int) -> None:
        raise AssertionError

    with cProfile.Profile(), pytest.raises(CaptureError, match="profile the step once it is planned"):
        PurityWatch(step, ()).run(step, 0)


@pytest.mark.parametrize(
    ("metadata", "whose"),
    [
        ("other-1.0.dist-info/METADATA", "library"),
        ("other.egg-info/installed-files.txt", "library"),
        ("EGG-INFO/PKG-INFO", "library"),
        ("mine.egg-info/PKG-INFO", "user"),
        ("", "user"),
    ],
)
def test_a_folder_of_installed_packages_is_known_by_what_was_installed(tmp_path, monkeypatch, metadata, whose):
    """``pip install --target``, PYTHONPATH and .pth files name folders outside of the interpreter's own."""
    if metadata:
        (tmp_path / metadata).parent.mkdir()
        (tmp_path / metadata).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert origin(str(tmp_path / "package" / "module.py")) == whose


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_another_interpreter_or_of_the_user_are_libraries(folder):
    assert origin(f"/home/user/.local/lib/python3.11/{folder}/package/module.py") == "library"


def test_global_names_are_those_of_dis():
    many = {}
    exec("def many():\n" + "".join(f"    global n{n}\n    n{n} = m{n}\n" for n in range(300)), many)  # wide arguments
    functions = [many["many"], *(each for each in vars(inspect).values() if inspect.isfunction(each))]
    for code in (part for function in functions for part in with_nested(function.__code__)):
        named = {i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME"))}
        imported = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
        assert globals_of(code) == named - imported


def test_methods_of_classes_of_c_are_no_state() -> None:
    method = vars(torch._C.DispatchKeySet)["add"]

    def step() -> bool:
        return callable(method)

    executed = ExecutedCode()
    with executed.watching():
        step()
    assert not reachable(step, (), executed).opaque
