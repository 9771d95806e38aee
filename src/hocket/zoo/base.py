"""Entries of the zoo, the requests that builders receive, and how a request is built reproducibly."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hocket.errors import InputError, MissingDependencyError
from hocket.job import Job

if TYPE_CHECKING:
    import torch

# By the name of a module: the package to install, and the extra of Hocket that installs it.
PACKAGES = {
    "sklearn": ("scikit-learn", "demo"),
    "pytorchcv": ("pytorchcv", "zoo"),
    "transformers": ("transformers", "zoo"),
}


@dataclass(frozen=True)
class Option:
    """A size that the caller may choose, always an integer."""

    name: str
    default: int
    summary: str
    minimum: int = 1


@dataclass(frozen=True)
class ZooEntry:
    """One entry of the zoo: a model, its data and its training step, not yet built."""

    name: str  # the name by which it is loaded
    summary: str  # one line for `hocket zoo`
    source: str  # the paper
    build: Callable[[Request], Job]  # makes the job of a request
    batch_size: int  # the default
    num_batches: int = 8  # the default
    optimizer: str = "sgd"  # the default, see `hocket.zoo.training.make_optimizer`
    lr: float = 0.05  # the learning rate for that optimizer
    options: tuple[Option, ...] = ()  # sizes that the caller may choose
    requires: str | None = None  # the module of an optional package, a key of `PACKAGES`, or None

    @property
    def package(self) -> str | None:
        """The optional package that the entry needs, or None."""
        return None if self.requires is None else PACKAGES[self.requires][0]

    @property
    def extra(self) -> str | None:
        """The extra of Hocket that installs the package (``pip install 'hocket[zoo]'``), or None."""
        return None if self.requires is None else PACKAGES[self.requires][1]

    def sized(self, size: Mapping[str, int]) -> Mapping[str, int]:
        """Check `size` and return the values of all options, defaults included."""
        options = {option.name: option for option in self.options}
        values = {name: option.default for name, option in options.items()}
        for name, value in size.items():
            if name not in options:
                raise InputError(f"{self.name}: unknown option {name!r}: it takes {', '.join(options) or 'no sizes'}")
            values[name] = checked_integer(f"{self.name}: {name}", value, minimum=options[name].minimum)
        return MappingProxyType(values)


@dataclass(frozen=True)
class Request:
    """Arguments of a builder, all checked.

    ``optimizer(parameters, betas=...)`` makes an optimizer of the chosen kind and rate. ``size`` has a value for every
    option of the entry.
    """

    name: str
    batch_size: int
    num_batches: int
    seed: int
    device: torch.device
    optimizer: Callable[..., torch.optim.Optimizer]
    size: Mapping[str, int]

    def build(self, entry: ZooEntry) -> Job:
        """Build ``entry`` from the seed, then restore the caller's random state.

        Everything is made on the CPU and then moved, so that the seed means the same on every device. Only the CPU's
        generator is seeded: ``torch.manual_seed`` would also seed the generators of all devices.
        """
        import torch

        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(self.seed)
            return entry.build(self)

    def optional(self, module: str) -> Any:
        """Import a module of an optional package. The error names the command that installs it."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            package, extra = PACKAGES[module.partition(".")[0]]
            raise MissingDependencyError(package, extra, self.name) from error


def checked_integer(what: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an int, or raise an `InputError` that names `what` and the limits."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    wrong = InputError(f"{what}: expected a whole number {limits}, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong from None
    if isinstance(value, bool) or number < minimum or (maximum is not None and number > maximum):
        raise wrong
    return number
