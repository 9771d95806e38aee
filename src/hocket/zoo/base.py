"""What a zoo entry is, what it is asked for, and how it is built without disturbing the caller."""

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


@dataclass(frozen=True)
class Option:
    """A size that the caller may choose, always a whole number."""

    name: str
    default: int
    summary: str
    minimum: int = 1


@dataclass(frozen=True)
class ZooEntry:
    """One line of the zoo: a model, its data and its training step, not yet built.

    ``source`` is the paper, ``package`` the one that holds the architecture where it is not written here, and
    ``extra`` the extra of Hocket that installs it (``pip install 'hocket[zoo]'``), or None. ``lr`` is the
    rate for the entry's own ``optimizer``.
    """

    name: str
    summary: str
    source: str
    build: Callable[[Request], Job]
    batch_size: int
    num_batches: int = 8
    optimizer: str = "sgd"
    lr: float = 0.05
    options: tuple[Option, ...] = ()
    package: str | None = None
    extra: str | None = None

    def sized(self, size: Mapping[str, int]) -> Mapping[str, int]:
        """The value of every option: those in ``size``, checked, and the defaults for the others."""
        options = {option.name: option for option in self.options}
        values = {name: option.default for name, option in options.items()}
        for name, value in size.items():
            if name not in options:
                raise InputError(f"{self.name}: unknown option {name!r}: it takes {_listed(options)}")
            values[name] = checked_integer(f"{self.name}: {name}", value, minimum=options[name].minimum)
        return MappingProxyType(values)


@dataclass(frozen=True)
class Request:
    """What a family's ``build`` is asked for, everything decided.

    ``optimizer(parameters, betas=...)`` makes an optimizer of the chosen kind and rate; ``size`` has a value
    for every option of the entry.
    """

    name: str
    batch_size: int
    num_batches: int
    seed: int
    device: torch.device
    optimizer: Callable[..., torch.optim.Optimizer]
    size: Mapping[str, int]

    def build(self, entry: ZooEntry) -> Job:
        """Build ``entry`` from the seed and put the caller's random state back.

        Everything is made on the CPU and then moved, so that the seed means the same on every device. Only
        the CPU's generator is seeded: ``torch.manual_seed`` would also seed the devices', which nobody asked
        for.
        """
        import torch

        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(self.seed)
            return entry.build(self)


def optional(module: str, *, package: str, extra: str, needed_by: str) -> Any:
    """Import ``module`` of an optional package, or say in one line how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(package, extra, needed_by) from error


def checked_integer(what: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """``value`` as an int, or an error that says what was expected."""
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    wrong = InputError(f"{what}: expected a whole number {limits}, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong from None
    if isinstance(value, bool) or number < minimum or (maximum is not None and number > maximum):
        raise wrong
    return number


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) if names else "no sizes"
