"""The variants of a step, and the choice of the one that makes a call.

Calls differ by their signature (shapes of the batch, modes of the modules), and calls of one signature by the Python
state that the step reads. Memory bounds how many variants are kept: the last used ones keep their lanes and the lanes'
memory, and graphs are bounded by their number of ops. A variant that was dropped comes back at the price of a dozen
steps, since its decision is remembered.

Between two calls that need Python (an audit, new state, every 25th call for the drift watch) a planned step is one
native call that makes all checks of this module, see ``native/direct.cpp``.

Two kinds of steps would be searched without end and are not. A step whose state never settles stays eager after
`MAX_STATES` variants that have saved less than their searches took. Those that have saved more (a variant for each
epoch, say) make room for new ones. Once there are `MAX_EASY` signatures, a new one is watched when its eager steps have
taken as long as a search does (as one buys skis when hiring them has cost as much: at most twice the price of knowing
before).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hocket.autotune.candidate import TunerConfig
from hocket.autotune.decision import Decision
from hocket.autotune.searching import RefusedCalls
from hocket.autotune.variant import Variant
from hocket.errors import StaleCaptureError
from hocket.pystate.batches import unfolded
from hocket.pystate.changes import named
from hocket.tracing.signature import FOLLOWED_KINDS, Signature, Signatures, what_differs
from hocket.tracing.switches import obstacle

log = logging.getLogger(__name__)

# Variants of one signature: a step whose state never settles would be captured for ever.
MAX_STATES = 8
# Number of them that are searched where all are refused.
MAX_REFUSED_STATES = 3
# Signatures that are searched when they come up first (a training's, its last batch's, those of other modes), and
# times that any other one has to come; where shapes hardly repeat, watching would cost and gain nothing.
MAX_EASY = 4
MIN_REPEATS = 3
# Calls after which a step of which no variant could be captured is not looked at any more.
MAX_REFUSED = 50
# Calls in a row by a refused variant beside planned ones, after which it is forgotten, and the growth of this number.
# It makes the calls of all states that no plan stands for, an evaluation's, say.
FORGET_AFTER = (20, 2)
# Signatures of which it is remembered how often they came.
MAX_COUNTED = 1000
# Variants whose lanes stay open: a few in any case, and more while all of them together keep little memory. To open
# lanes again takes some 0.1 ms an op, so batches of many lengths in turns would pay more for that than planning gains.
MAX_OPEN, MAX_OPEN_BYTES = 8, 256 * 2**20
# A captured op takes about 14 KB of Python objects: some 400 MB.
MAX_HELD_OPS = 30_000


@dataclass
class _Met:
    """Eager calls of a signature that is not watched yet, and what they took."""

    num_calls: int = 0
    eager_s: float = 0.0


class VariantPool:
    """Makes each call by its variant, begins new variants and drops old ones.

    `before_eager` is called before a call that runs the user's own step and nothing else.
    """

    def __init__(self, config: TunerConfig, before_eager: Callable[[], None]) -> None:
        self.config = config
        self.for_good: Callable[[Any], Any] = self.eagerly  # makes calls of a step that is not looked at any more
        self.current = Variant(config)  # the variant of the last call
        self._before_eager = before_eager
        self._versions = config.places.versions()
        self._signatures = Signatures()
        self._variants: dict[Signature, list[Variant]] = {}
        self._recent: dict[Variant, int] = {}  # calls of all of them, the one used last at the end
        self._open: dict[Variant, None] = {}  # those whose lanes may be open, the one used last at the end
        self._eager: Variant | None = None  # says why no variant made a call
        self._met: dict[Signature, _Met] = {}  # signatures that are not watched yet
        self._searched: set[Signature] = set()  # those that had a variant, which may be forgotten by now
        self._waiting: _Met | None = None  # that of this call
        self._num_leaves = 0  # those of `config.leaves` that are in its places
        self._failed = False  # the last call raised
        self._direct: Any = None  # calls of the current variant that need nothing of Python
        self._has_plan = False  # some variant is captured
        self._num_refused = 0  # calls of refused variants, while none was ever captured
        self._refused_calls = RefusedCalls(*FORGET_AFTER)

    def __call__(self, batch: Any) -> Any:
        """One training step."""
        if self._direct is not None:
            failure: BaseException | None = None
            try:
                result = self._direct(batch)
            except BaseException as error:  # noqa: BLE001  # raised again, unless eager can make the step
                failure = error
            if failure is not None:
                self._failed = True
                self._end_direct(failure)
                return self.current.made_again(failure, batch)
            if result is not NotImplemented:
                return result
            self._end_direct()
        if self._num_refused > MAX_REFUSED:
            return self.for_good(batch)
        batch = unfolded(batch)
        if reason := obstacle():
            return self._eagerly(batch, f"it is eager while {reason}")
        if self._versions and self.config.places.versions() != self._versions:
            self.start_anew()
        try:
            key = self._key(batch)
        except Exception as error:  # noqa: BLE001  # nothing was run: whatever it is, the step is eager
            return self._unseen(batch, error)
        failed, self._failed = self._failed, False
        if failed and self._has_plan and not any(variant.captured for variant in self._variants.get(key, ())):
            return self.config.step(batch)  # a step that failed has left no gradients; that is not worth a capture
        candidates = self._candidates(key, batch)
        while True:
            try:
                variant = next(candidates, None)
            except Exception as error:  # noqa: BLE001  # nothing was run
                return self._unseen(batch, error)
            if variant is None:
                return self._unwatched(batch)
            try:
                return self._make(variant, batch)
            except StaleCaptureError:
                continue  # nothing was run: the graph does not stand for this step

    @property
    def recognised(self) -> Any:
        """The native check that recognised the last call, or None if Python had to describe it."""
        return self._signatures.recognised

    @property
    def has_plan(self) -> bool:
        return self._has_plan

    @property
    def is_scattered(self) -> bool:
        """True where signatures hardly come again, and no variant has a plan."""
        return sum(met.num_calls for met in self._met.values()) >= MAX_EASY and all(
            variant.decision.best is None for variant in self._recent
        )

    @property
    def num_states(self) -> int:
        """The number of variants of one signature, at most. Those that have paid do not count."""
        return max((len(self._unpaid(variants)) for variants in self._variants.values()), default=0)

    def eagerly(self, batch: Any) -> Any:
        """The user's own step."""
        self._before_eager()
        return self.config.step(batch)

    def start_anew(self) -> None:
        """Models were dropped, refilled or frozen: every tensor may be another one, and no graph stands any more."""
        self.close()
        self._clear()
        self.config = replace(self.config, places=self.config.places.again(tuple(self.config.leaves.values())))
        self._versions = self.config.places.versions()
        self.current = Variant(self.config)

    def close(self) -> None:
        """Close all lanes."""
        self._end_direct()
        for variant in self._recent:
            variant.close()

    def _end_direct(self, error: BaseException | None = None) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            times_ms = direct.times_ms()
            self._count(self.current, len(times_ms))
            self.current.note_direct(times_ms, error)

    def _clear(self) -> None:
        self._variants.clear()
        self._recent.clear()
        self._open.clear()
        self._eager = None
        self._met.clear()
        self._num_refused = 0

    def _candidates(self, key: Signature, batch: Any) -> Iterator[Variant]:
        """The variants that may stand for this call, the last of them a new one if none of the others did."""
        variants = self._variants.get(key, ())
        yield from (variant for variant in list(variants) if variant.fits(batch))
        yield from (variant for variant in list(variants) if variant.renew() and variant.fits(batch))
        if not any(variant.lacks_state for variant in variants):  # an eager step makes it
            new = self._another(key, batch)
            if new is not None:
                yield new

    def _key(self, batch: Any) -> Signature:
        """The signature of this call, without numbers and text in the batch that change with each call."""
        try:
            if len(self.config.leaves) > self._num_leaves:
                raise LookupError("more tensors get gradients than were known")
            key = self._signatures.of(self.config.places, batch, self.config.watch.live_leaves)
        except LookupError:
            key = self._key_anew(batch)  # a parameter goes by another name now, or is gone
        if key not in self._variants and self._find_live_leaves(key):
            key = self._signatures.of(self.config.places, batch, self.config.watch.live_leaves)
        return key

    def _key_anew(self, batch: Any) -> Signature:
        self._num_leaves = len(self.config.leaves)
        self.config = replace(self.config, places=self.config.places.again(tuple(self.config.leaves.values())))
        return self._signatures.of(self.config.places, batch, self.config.watch.live_leaves)

    def _find_live_leaves(self, key: Signature) -> bool:
        """Return True if a known batch differs by numbers and text only, which are read in each call from then on."""
        watch = self.config.watch
        moved = self._signatures.leaves_moved(key, watch.live_leaves)
        are_followed = watch.executed.follows_numbers and all(key.values[n][0] in FOLLOWED_KINDS for n in moved)
        if not moved or not are_followed:
            return False
        watch.live_leaves.update(moved)
        self.close()
        self._clear()
        return True

    def _eagerly(self, batch: Any, reason: str) -> Any:
        """The user's own step, which no variant makes, for this reason."""
        self._say(reason)
        return self.eagerly(batch)

    def _say(self, reason: str) -> None:
        """No variant makes this call, for this reason."""
        if self._eager is None or self._eager.decision.reason != reason:
            self._eager = Variant(self.config)
            self._eager.decision = Decision("eager", reason)
        self.current = self._eager

    def _unwatched(self, batch: Any) -> Any:
        """The user's own step, of which no variant was begun, or none can be."""
        met, self._waiting = self._waiting, None
        start_s = self.config.clock()
        result = self.eagerly(batch)
        if met is not None:
            met.eager_s += self.config.clock() - start_s
        return result

    def _unseen(self, batch: Any, error: Exception) -> Any:
        """The user's own step, whose inputs cannot be described."""
        reason = f"the state before the step could not be looked at ({type(error).__name__}: {error}); please report it"
        if self.current.decision.reason != reason:
            log.warning("hocket: this call is eager: %s", reason, exc_info=error)
        return self._eagerly(batch, reason)

    def _make(self, variant: Variant, batch: Any) -> Any:
        if variant is not self.current:
            self._switch(variant)
        if variant.is_eager:
            self._before_eager()
        try:
            result = variant(batch)
            if not self.config.is_region:  # which calls natively by itself
                self._direct = variant.direct(self._signatures.recognised)
            self._count(variant, 1)
            if variant.captured is not None or variant.is_refused:  # one that was captured may differ from eager
                self._has_plan = any(each.captured is not None for each in self._recent)
            self._num_refused += variant.is_refused and not self._has_plan
            if self._refused_calls.are_many(variant.may_be_rare and self._has_plan):
                self._forget(variant)
            return result
        except StaleCaptureError:
            raise
        except BaseException:
            # The step itself failed, or was interrupted; if that was on the way to a verdict, begin anew next time.
            self._failed = True
            if not variant.settled:
                self._forget(variant)
            raise

    def _switch(self, variant: Variant) -> None:
        """Another variant makes this call: lanes that were not used for long are closed."""
        self.current = variant
        if variant in self._recent:
            self._recent[variant] = self._recent.pop(variant)
        self._open.pop(variant, None)
        self._open[variant] = None
        while len(self._open) > MAX_OPEN and sum(each.decision.kept_bytes for each in self._open) > MAX_OPEN_BYTES:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.close()

    def _another(self, key: Signature, batch: Any) -> Variant | None:
        """Return a new variant if none of this signature is valid now, or None if it is too early for one."""
        variants = self._variants.get(key, [])
        if not variants and not self._pays(key):
            return None
        place = self._what_changed(variants)
        key = self._key_anew(batch)
        variants = self._variants.get(key, [])
        refused = ""
        if len(variants) >= MAX_REFUSED_STATES and all(variant.is_refused for variant in variants):
            refused = variants[0].decision.reason
        elif len(self._unpaid(variants)) >= MAX_STATES:
            captured = variants[-1].captured
            why = f"{place} still changes" if place else "" if captured is None else captured.why_not(batch)
            refused = f"it was watched for {MAX_STATES} variants of its state, and {why or 'its state still changes'}"
        elif len(variants) >= MAX_STATES:
            self._forget(next(variant for variant in self._recent if variant in variants))
        self._make_room()
        self._searched.add(key)
        variant = Variant(self.config, refused=refused)
        self._variants.setdefault(key, []).append(variant)
        self._recent[variant] = 0
        return variant

    def _count(self, variant: Variant, num_calls: int) -> None:
        if variant in self._recent:
            self._recent[variant] += num_calls

    def _unpaid(self, variants: Iterable[Variant]) -> list[Variant]:
        return [
            variant for variant in variants if not variant.decision.has_paid(self._recent[variant], variant.search_s)
        ]

    def _pays(self, key: Signature) -> bool:
        """Return True if a signature without a variant is worth a search. Otherwise the verdict says what to do."""
        if len(self._variants) < MAX_EASY or key in self._searched:
            return True
        for counted in (self._met, self._searched):
            if len(counted) > MAX_COUNTED:
                counted.clear()
        met, search_s = self._met.setdefault(key, _Met()), self._search_s
        if met.num_calls >= MIN_REPEATS and met.eager_s >= search_s:
            del self._met[key]
            return True
        met.num_calls += 1
        self._waiting = met
        what, cure = what_differs(key, self._variants)
        reason = (
            f"there were {len(self._variants)} {what}, before this one; it is watched once it has come {MIN_REPEATS} "
            f"times and its steps have taken as long as a search ({search_s:.2g} s): {cure}"
        )
        moved = self._signatures.leaves_moved(key, self.config.watch.live_leaves)
        if moved:
            kind = key.values[moved[0]][0]
            others = "" if kind in FOLLOWED_KINDS else ", or make it a number, text or a tensor"
            reason = f"each batch holds another value of type {kind.__name__}, and a graph stands for one of them: "
            reason += f"keep it out of the batch{others}"
        if len(self._met) == 1 and met.num_calls == 1:
            log.info("hocket: %s", reason)
        self._say(reason)
        return False

    @property
    def _search_s(self) -> float:
        """The time that a search takes beyond its steps, by those that there were."""
        known = [variant.search_s for variant in self._recent if variant.search_s is not None]
        return sum(known) / len(known) if known else 0.0

    def _make_room(self) -> None:
        """Forget who was used longest ago, as long as all graphs together are too large."""
        num_ops = {variant: sum(len(captured.graph) for captured in variant.forms.values()) for variant in self._recent}
        total = sum(num_ops.values())
        for variant, ops in num_ops.items():
            if total <= MAX_HELD_OPS:
                break
            total -= ops
            self._forget(variant)

    def _what_changed(self, variants: list[Variant]) -> str:
        """Name the state that makes the last of these variants invalid. Numbers are read in each call from now on."""
        variant, guards = (variants[-1], variants[-1].guards) if variants else (None, None)
        if variant is None or guards is None:
            return ""
        changes, are_followed = guards.note_changes()
        if changes and are_followed:
            self._forget(variant)  # the next capture stands for every value of these numbers
        return named(changes)

    def _forget(self, variant: Variant) -> None:
        for key, variants in list(self._variants.items()):
            if variant in variants:
                variants.remove(variant)
                if not variants:
                    del self._variants[key]
        self._recent.pop(variant, None)
        self._open.pop(variant, None)
        variant.close()
