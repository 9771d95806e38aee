"""One training job: what a target file returns and what every command of Hocket runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hocket.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Job:
    """A training step with everything it works on.

    step
        The user's own function ``step(batch) -> loss``, unchanged: it closes over the model and the
        optimizer, computes the loss, calls ``backward`` and updates the parameters.
    model, optimizer
        What the step closes over. Each is one object, or a list where there are several (a GAN has two of
        both).
    batches
        What to feed the step: a sequence of batches, or anything that can be iterated again and again, such
        as a ``DataLoader``. A batch is whatever the step takes.
    name
        What reports call the job.

    Two jobs are equal only when they are the same object.

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            inputs, targets = batch
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        job = Job(step, model, optimizer, [(torch.randn(8, 4), torch.randn(8, 1))], name="line")
        job.step(job.batch(0))
    """

    step: Callable[[Any], Any]
    model: torch.nn.Module | Sequence[torch.nn.Module]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    batches: Iterable[Any]
    name: str = ""
    _reader: _Reader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise InputError(f"Job.step: expected a function step(batch) -> loss, got {_kind(self.step)}")
        _check_members("model", self.models, ("parameters",), "a torch.nn.Module")
        _check_members("optimizer", self.optimizers, ("step", "param_groups"), "a torch.optim.Optimizer")
        _check_batches(self.batches)
        if not isinstance(self.name, str):
            raise InputError(f"Job.name: expected a string, got {_kind(self.name)}")
        object.__setattr__(self, "_reader", _Reader(self.batches))

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The models, also where there is only one."""
        return _as_tuple(self.model)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers, also where there is only one."""
        return _as_tuple(self.optimizer)

    def batch(self, index: int) -> Any:
        """Return the batch for step ``index`` (0, 1, 2, ...), starting over after the last one.

        Batches that can only be iterated are read on from the last one that was returned. An earlier index, and the end
        of the batches, begins anew (a shuffling ``DataLoader`` shuffles again). Pass a list if that matters.
        """
        if index < 0:
            raise InputError(f"Job.batch: expected an index of 0 or more, got {index}")
        batches: Any = self.batches
        if (length := _length(batches)) and hasattr(batches, "__getitem__"):
            return batches[index % length]
        return self._reader.read(index)


class _Reader:
    """Batches that can only be iterated, by their number. One iterator is kept, and read on."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._length = _length(batches)
        self._iterator: Iterator[Any] | None = None
        self._num_read = 0
        self._last: Any = None

    def read(self, index: int) -> Any:
        position = index if self._length is None else index % self._length
        if self._iterator is not None and self._num_read == position + 1:
            return self._last
        if self._iterator is None or self._num_read > position:
            self._begin()
        while True:
            for batch in self._iterator:  # type: ignore[union-attr]
                self._num_read += 1
                self._last = batch
                if self._num_read == position + 1:
                    return batch
            if not self._num_read:
                raise InputError("Job.batches: there is no batch left to read")
            self._length = self._num_read
            position = index % self._length
            self._begin()

    def _begin(self) -> None:
        self._iterator, self._num_read, self._last = iter(self._batches), 0, None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _length(batches: Any) -> int | None:
    """Number of batches, or None if only reading them shows it.

    A ``DataLoader`` over a stream has a ``__len__`` that raises TypeError, and so has a tensor without axes.
    """
    try:
        return len(batches)
    except TypeError:
        return None


def _check_members(field: str, members: tuple[Any, ...], needed: tuple[str, ...], expected: str) -> None:
    """Check every member by its attributes, so that torch stays unloaded."""
    if not members:
        raise InputError(f"Job.{field}: expected {expected} or a list of them, got an empty list")
    for position, member in enumerate(members):
        if isinstance(member, type) or not all(hasattr(member, attribute) for attribute in needed):
            where = f"Job.{field}" if len(members) == 1 else f"Job.{field}[{position}]"
            got = f"the class {member.__name__} itself" if isinstance(member, type) else _kind(member)
            raise InputError(f"{where}: expected {expected}, got {got}")


def _check_batches(batches: Any) -> None:
    if isinstance(batches, (Mapping, str, bytes)):
        raise InputError(f"Job.batches: expected a sequence of batches, got one {type(batches).__name__}")
    if isinstance(batches, Iterator):
        raise InputError("Job.batches: an iterator is read only once, but steps repeat: use list(batches)")
    length = _length(batches)
    if length is None:
        try:
            length = sum(1 for _ in itertools.islice(batches, 1))
        except TypeError:
            raise InputError(f"Job.batches: expected a sequence of batches, got {_kind(batches)}") from None
    if length == 0:
        raise InputError("Job.batches: expected at least one batch, got none")
