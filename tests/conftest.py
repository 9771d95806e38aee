"""Shared by all tests: hypothesis profiles, fixed seeds, and the skip for machines without a GPU."""

import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Two test processes share two cores: an idle OpenMP thread that spins holds up the other one a hundredfold. libgomp
# reads this when torch is loaded, so it stands before anything that could load it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests remember decisions in folders of their own (`cache_folder`), but share the compiled lanes.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.expanduser("~/.cache/torch_extensions"))

import pytest

from support.partition_core import load_shared, note_users_cache

note_users_cache()

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make gpu PY=python3` runs tests/gpu where only torch and pytest are installed
    pass
else:
    # No deadlines: on a busy machine a slow example says nothing about the code.
    quiet = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("default", quiet)
    settings.register_profile("ci", quiet, derandomize=True, max_examples=30, print_blob=True)
    settings.register_profile("thorough", quiet, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


_numbers = itertools.count()


_FROZEN = pytest.StashKey[int]()  # how many modules there were when what they hold was put aside
MANY_MODULES = 200


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects of the collection phase (torch, thousands of tests), so that the collector skips them."""
    load_shared()
    gc.collect()
    gc.freeze()
    session.config.stash[_FROZEN] = len(sys.modules)
    torch = sys.modules.get("torch")
    if torch and not torch.cuda.is_available():
        # Each `manual_seed` would write down the stack of its caller for a GPU that may come, which takes 1 ms.
        torch.cuda.manual_seed_all = lambda seed: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if len(sys.modules) > item.config.stash[_FROZEN] + MANY_MODULES:  # a test has loaded a library, which stays, too
        pytest_collection_finish(item.session)
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of one test; it does not exist until something is kept there."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program uses the machine, as far as a search can see. Tests run side by side."""
    if module := sys.modules.get("hocket.adaptation.cpu_use"):
        monkeypatch.setattr(module.CpuUse, "cores_of_others", lambda self: 0.0)


@pytest.fixture
def own_objects() -> Iterator[None]:
    """Leave out of ``gc.get_objects()`` what lived before the test: another test's threads may let go of some now."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed every generator a test could draw from, without loading torch for a test that does not."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules plan for one core, where a search has no widths to try and hardly any plans to compare."""
    from hocket.ir import Machine

    alone = Machine.of(cores=1)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: alone))


@contextmanager
def threads(count: int) -> Iterator[None]:
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Eager, the serial plan and every lane are one thread wide: then they take the same kernels."""
    with threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield
