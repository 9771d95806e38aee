"""`StepParts`: a step as the Python before its ops, the part that runs ops, and the Python after them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from hocket.arguments import packed, spreading, unpacked
from hocket.pystate.op_lines import SourceSpan, places
from hocket.pystate.watch import PurityWatch

# Keyword arguments of the parts.
BEFORE, LIVE = "_hocket_before", "_hocket_live"
# A part returns it after the step's result where no other comes after.
RETURNED = "_hocket_returned"


@dataclass(frozen=True)
class StepParts:
    """A step in three parts."""

    # called with the step's arguments. Returns the values that the middle and the last part need, or the step's result
    # and `RETURNED` where the step ends there. None if nothing comes before.
    before: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] | None
    # called with the step's arguments, and `BEFORE` if there is a first part. Returns a tuple: what the last part
    # needs, or the step's result and `RETURNED` where the step ends there.
    middle: Callable[..., tuple[Any, ...]]
    # called with the step's arguments, with the second of the first part as `BEFORE` and the tuple of the middle as
    # `LIVE`. Returns the step's result.
    after: Callable[..., Any]
    lines: str  # of the user's code that is not in the middle
    codes: tuple[CodeType, ...] = ()  # of the functions that are divided
    leaves_draws: bool = False  # the middle has calls that draw or fetch
    is_exchanged: bool = False  # some statements of the middle are not the step's own (see `hocket.pystate.exchange`)
    # the source of statements of the middle, which only train, that stood behind some that come after it now
    passed: frozenset[SourceSpan] = frozenset()
    # each asks whether the step still calls a function that was divided or exchanged
    asks: tuple[Callable[[], bool], ...] = ()

    def watch(self, roots: Iterable[Any]) -> PurityWatch:
        return PurityWatch(getattr(self.middle, "__wrapped__", self.middle), roots, self.codes)

    def begin(self, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run what comes before: the batch of the middle, and what the last part gets.

        The step's result and `RETURNED` where the step ends there.
        """
        if self.before is None:
            return batch, ()
        args, kwargs = unpacked(batch)
        drawn, kept = self.before(*args, **kwargs)
        if is_end(kept):
            return drawn, kept
        return (packed(args, {**kwargs, BEFORE: drawn}) if drawn else batch), kept

    def alone(self, own: Any) -> Any:
        """Run the middle, with the batch that `begin` made, as eager does."""
        return spreading(self.middle)(own)

    def end(self, batch: Any, kept: tuple[Any, ...], live: tuple[Any, ...]) -> Any:
        """Run the last part with the result of the middle, and return the step's result."""
        if len(live) == 2 and is_end(live[1]):
            return live[0]
        args, kwargs = unpacked(batch)
        return self.after(*args, **{BEFORE: kept, LIVE: live}, **kwargs)

    @property
    def holds(self) -> bool:
        """True if they are the step's still. Otherwise the step has to be divided anew."""
        return all(ask() for ask in self.asks)

    @property
    def is_over(self) -> bool:
        """True if the step has to be divided in another way. See `hocket.pystate.drawn` for this and the next three."""
        return False

    @property
    def was_left(self) -> bool:
        """True if nothing that was recorded in the last step is valid."""
        return False

    def runs_users(self, calls: Collection[tuple[CodeType, int]]) -> bool:
        """True if one of these calls of the user's code is in a statement that others have passed: a hook's, say."""
        files = [code.co_filename for code in self.codes] if self.passed else []
        own = {code for code, _ in calls if code.co_filename in files}
        return any(span.covers(place) for code in own for place in places(calls, code) for span in self.passed)

    def raised(self) -> None:
        """The middle has raised."""

    def anew(self) -> Sequence[Any]:
        """Parts that take the place of these from the next call on."""
        return ()

    def bound(self, bind: Callable[[Any], Any]) -> StepParts:
        """The parts as a method's, or with arguments that are given already."""
        before = None if self.before is None else bind(self.before)
        return replace(self, before=before, middle=bind(self.middle), after=bind(self.after))


def is_end(value: Any) -> bool:
    """Return True for `RETURNED`."""
    return type(value) is str and value == RETURNED
