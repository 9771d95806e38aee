"""A plugin of pytest (``-p support.sanitized``): the C++ cores are built with AddressSanitizer and its like.

The process has to be started with the sanitizer's library in ``LD_PRELOAD``, since Python was built without it, and the
cores are built before, since a compiler under a sanitizer takes minutes (see ``make sanitize``). Flags are part of the
name of a core, so that others are left as they are.
"""

import contextlib
import sys

import pytest

from hocket.cache_folder import is_sealed, native_folder, private_folder, seal
from hocket.native import build
from hocket.planning.partition import compiled

CHECKS = {"address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"), "thread": ("-fsanitize=thread",)}


def choose(sanitizer: str) -> None:
    """Build cores with these flags from now on."""
    flags = ["-g", "-O1", "-fno-omit-frame-pointer", *CHECKS[sanitizer]]
    for module in (build, compiled):
        module._FLAGS = [*(flag for flag in module._FLAGS if flag != "-O2"), *flags]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitizer", choices=CHECKS, default="address")


def pytest_configure(config: pytest.Config) -> None:
    choose(config.getoption("--sanitizer"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A core of the plain flags would pass whatever is wrong with it.
    assert build.load().__name__ == build.core_name()


def compile_core() -> None:
    """Compile the core of native lanes, once, without loading it, which this process cannot."""
    name = build.core_name()
    folder = private_folder(native_folder() / name)
    if is_sealed(folder / f"{name}.so"):
        return
    with contextlib.suppress(ImportError):  # "runtime does not come first in initial library list"
        build.build(name, folder)
    seal(folder / f"{name}.so")


if __name__ == "__main__":
    choose(sys.argv[1])
    compile_core()
