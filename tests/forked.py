"""Processes that are forked from one which has loaded torch, and done nothing else: others spend seconds on that.

They share nothing with the process of the tests, and get its environment.
"""

import atexit
import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

PRELOADED = [
    "pytest",
    "torch._dynamo",  # an optimizer imports it (4 s)
    "torch.utils.cpp_extension",
    "distributed.agents",
    "distributed.faulty",
    "tests.search.killed",
    "preloaded",  # the last one
]


def context() -> Any:
    """Makes such processes, in the way of `multiprocessing`."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)  # what cannot be imported is left out
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it is not told what this process looks in
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return made


def in_place_of_spawn(monkeypatch: Any) -> None:
    """Have code that starts processes anew fork them for the rest of a test: they have loaded torch then."""
    made = context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: made)


def run(
    code: str, *words: str, timeout_s: float = 120.0, warn: str = "ignore", finalize: bool = False
) -> subprocess.CompletedProcess[str]:
    """Do the same as ``python -W warn -c code words``.

    With `finalize` the interpreter ends as it does there; without, the process ends once exit handlers have run.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        arguments = (code, words, warn, finalize, dict(os.environ), os.getcwd(), [str(path) for path in said])
        process = context().Process(target=_interpret, args=arguments)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout_s, said[0].read_text(), said[1].read_text())
        return subprocess.CompletedProcess(code, process.exitcode, *(path.read_text() for path in said))


def _interpret(
    code: str,
    words: tuple[str, ...],
    warn: Any,
    finalize: bool,
    environment: dict[str, str],
    folder: str,
    said: list[str],
) -> None:
    for number, path in enumerate(said, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = ["-c", *words]
    warnings.simplefilter(warn)
    status = 0
    try:
        # In the module's own namespace alone, which is emptied where an interpreter ends.
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001  # said as an interpreter says it
        traceback.print_exc()
        status = 1
    if finalize:
        ctypes.pythonapi.Py_Exit(status)  # a process of `multiprocessing` would end at once, with everything alive
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to take all modules apart takes half a second
