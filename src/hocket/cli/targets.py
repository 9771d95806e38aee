"""A TARGET of the command line, a name of the zoo or ``file.py:function``, and the job that it stands for."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.console import Bar, UsageError, prints_aside
from hocket.errors import HocketError, InputError
from hocket.job import Job
from hocket.reporting.words import count_text

if TYPE_CHECKING:
    import torch

# Arguments of `hocket.zoo.load` beside the sizes of an entry that have no option on the command line.
_FURTHER_SETTINGS = ("lr", "num_batches")


class StepError(HocketError):
    """The user's own code failed: importing it, making the job, or a step."""


@dataclass(frozen=True)
class Target:
    """The target that the user named, and the options that only a zoo entry takes.

    Target("mlp", batch_size=8, settings={"width": 64}).job()
    Target("train.py:make_job").job()
    """

    words: str
    batch_size: int | None = None
    optimizer: str | None = None
    seed: int | None = None
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    device: str | None = None

    @staticmethod
    def of(args: Namespace) -> Target:
        """Return the target that parsed arguments name."""
        device = getattr(args, "device", None)
        return Target(args.target, args.batch_size, args.optimizer, args.seed, dict(args.settings), device)

    @property
    def path(self) -> Path | None:
        """The file of a ``file.py:function``, or None for a name of the zoo."""
        if ":" in self.words or self.words.endswith(".py"):
            return Path(self.words.rpartition(":")[0] if ":" in self.words else self.words)
        return None

    def job(self) -> Job:
        """Build the job. A wrong name is a `UsageError`, and a failure of the user's code a `HocketError`."""
        path = self.path
        return self._from_zoo() if path is None else self._from_file(path)

    @contextmanager
    def blamed(self, what: str, *, calls_us: bool = False) -> Iterator[None]:
        """Turn an exception within into one line that names the place in the user's file.

        Hocket's own errors pass unchanged, unless the user's code calls Hocket.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, HocketError) and not calls_us:
                raise
            place = self._place(error)
            # The cause may be outside the user's file: then the line must not end the search.
            where = f" ({place})" if place else " (--traceback shows where)"
            raise StepError(f"{self.words}: {what} failed{where}: {_problem(error)}") from error

    def _from_zoo(self) -> Job:
        import torch

        from hocket import zoo

        entry = zoo.entries().get(self.words)
        known = [*(option.name for option in entry.options), *_FURTHER_SETTINGS] if entry else list(self.settings)
        for name in self.settings:
            if name not in known:
                raise UsageError(f"{self.words}: --set {name}: no such setting; it takes {', '.join(known)}")
        settings: dict[str, Any] = dict(self.settings)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device: torch sees no GPU here; --simulate a100 simulates one")
        if self.device is not None:
            settings["device"] = self.device
        try:
            with self.blamed("building it"):  # such as sizes for which there is no memory
                return zoo.load(
                    self.words, batch_size=self.batch_size, optimizer=self.optimizer, seed=self.seed or 0, **settings
                )
        except InputError as error:
            hint = "" if entry else "; a function of your own is written file.py:function"
            raise UsageError(f"{error}{hint}") from error

    def _from_file(self, path: Path) -> Job:
        job = self.result(path)
        if not isinstance(job, Job):
            got = "None" if job is None else f"a value of type {type(job).__name__}"
            raise InputError(
                f"{self.words}: expected it to return hocket.Job(step, model, optimizer, batches), got {got}"
            )
        return job if job.name else replace(job, name=f"{path.name}:{self.words.rpartition(':')[2]}")

    def result(self, path: Path) -> Any:
        """Call the function of a file and return its result. Raises as `job`."""
        self._check_words(path)
        name = self.words.rpartition(":")[2]
        with self.blamed("importing it", calls_us=True):
            module = _imported(path)
        function = getattr(module, name, None)
        if function is None:
            raise UsageError(f"{path} has no function {name!r}; {_functions(path)}")
        if not callable(function):
            raise UsageError(f"{self.words} is no function but a value of type {type(function).__name__}")
        needed = _needed(function)
        if needed:
            raise UsageError(f"{self.words}: expected a function without arguments, it needs {', '.join(needed)}")
        with self.blamed("the function", calls_us=True):
            return function()

    def _check_words(self, path: Path) -> None:
        given = {
            "--batch-size": self.batch_size,
            "--optimizer": self.optimizer,
            "--seed": self.seed,
            "--device": self.device,
            "--set": self.settings or None,
        }
        for option, value in given.items():
            if value is not None:
                raise UsageError(f"{self.words}: {option} is for zoo entries; here the function decides")
        if path.suffix != ".py":
            raise UsageError(f"{self.words}: expected a zoo entry or file.py:function")
        if not path.is_file():
            raise UsageError(f"no such file: {path}")
        if not self.words.rpartition(":")[2].isidentifier() or ":" not in self.words:
            raise UsageError(f"{self.words}: expected file.py:function; {_functions(path)}")

    def _place(self, error: BaseException) -> str:
        """The deepest line of the user's file on the way to the error."""
        path = self.path
        if path is None:
            return ""
        if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == path.name:
            return f"{path}, line {error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
        return f"{path}, line {lines[-1]}" if lines else ""


# About 20 microseconds: as fast as libgomp's own default for a step by itself, and off the core soon after.
SPIN_COUNT = "10000"


def wait_policy() -> str:
    """Let OpenMP's idle threads spin only briefly, unless the user has decided, and return a note on the setting.

    By default they spin for milliseconds after each parallel region, on cores that another lane may need. Without any
    spinning (OMP_WAIT_POLICY=passive) eager itself takes two to four times as long where ops are small, which would
    make a plan look better than it is. The variable is read once, when torch loads its OpenMP library, so it is set
    here, in this process, before anything imports torch.
    """
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        if variable in os.environ:
            return f"{variable}={os.environ[variable]}, as the environment had it"
    if "torch" in sys.modules:
        return "GOMP_SPINCOUNT is not set: torch was loaded before it could be, and its idle threads may spin for long"
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return f"GOMP_SPINCOUNT={SPIN_COUNT} was set for this process, eager included, so that idle threads spin briefly"


@contextmanager
def working(args: Namespace, what: str, *, moving: bool = False) -> Iterator[tuple[Target, Job, Bar]]:
    """Yield the job that the arguments name, and a progress bar. The user's code prints to stderr meanwhile.

    Afterwards the working directory is what it was, since paths of results are in it.
    """
    target = Target.of(args)
    with prints_aside(), chdir("."), Bar(what, moving=moving) as bar:
        yield target, target.job(), bar


def only_model(job: Job, user: str) -> torch.nn.Module:
    """Return the model of a job that has one model, or raise an `InputError` that names the `user` of it."""
    if len(job.models) != 1:
        raise InputError(f"{job.name}: it has {count_text(len(job.models), 'model')}, and {user} takes one")
    return job.models[0]


def _problem(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # noqa: BLE001 - of the user's class
        text = ""
    if isinstance(error, ImportError) and "relative import" in text:
        text += "; write the function into a file beside the package, which imports from it by name"
    if isinstance(error, HocketError):
        return text
    text = text.partition("Exception raised from ")[0].rstrip()  # by torch, behind which its C++ frames stand
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _imported(path: Path) -> Any:
    """The module of a file, imported so that its neighbours are found as if it had been started itself."""
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    """The name by which Python finds a file, so that processes which the user's code starts find what is in it.

    It is another name where there is such a module, because a file called json.py must not replace that one.
    """
    if "." not in path.stem and path.stem not in sys.modules:
        spec = importlib.util.find_spec(path.stem)
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve():
            return path.stem
    return f"hocket_target_{path.stem}"


def _functions(path: Path) -> str:
    """The functions of a file, in words, without running it."""
    try:
        found = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        return f"it does not parse: {error.msg}, line {error.lineno}"
    names = [node.name for node in found if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return f"functions there: {', '.join(names)}" if names else "there is no function there"


def _needed(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
