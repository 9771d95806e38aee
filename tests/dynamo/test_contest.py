"""Dynamo's graph as it stands, or the compiled one, stays. A clock of the test's own says what a call takes."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hocket.autotune import comparison
from hocket.autotune.store import Remembered
from hocket.dynamo import contest
from hocket.dynamo.contest import Contest

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
MANY = 2 * comparison.MAX_ATTEMPTS * comparison.NUM_ROUNDS * comparison.STEPS_IN_A_ROW + 10


class _Clock:
    now_s = 0.0

    def read(self) -> float:
        return self.now_s


class _Timed:
    """A function, its calls counted, and a clock that each call and each backward moves on."""

    def __init__(self, clock: _Clock, forward_s: float, backward_s: float = 0.0, scale: float = 2.0) -> None:
        self.num_calls = 0
        self.on_call: Callable[[], object] = lambda: None
        self._clock, self._forward_s, self._backward_s, self._scale = clock, forward_s, backward_s, scale

    def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        self.num_calls += 1
        self.on_call()
        self._clock.now_s += self._forward_s
        result = value * self._scale
        if result.requires_grad:
            result.grad_fn.register_prehook(self._backward)
        return (result,)

    def _backward(self, gradients: Any) -> None:
        self._clock.now_s += self._backward_s


class _Judge:
    """A contest of two functions with one region, which is planned."""

    def __init__(self, original: tuple[float, ...], compiled: tuple[float, ...], **options: Any) -> None:
        self.clock = _Clock()
        self.original, self.compiled = _Timed(self.clock, *original), _Timed(self.clock, *compiled)
        verdict = options.pop("verdict", "planned")
        self.region = mock.Mock(verdict=verdict, is_final=True, was_called=False, is_clear=True)
        self.kept: list[Remembered] = []
        self.compiled.on_call = lambda: setattr(self.region, "was_called", True)
        given = {"needs_equal_bits": True, "is_known": False, "keep": self.kept.append, "seed": "0", **options}
        self.contest = Contest(self.original, self.compiled, [self.region], [], **given)

    def train(self, num_steps: int, num_calls: int = 1) -> None:
        weight = torch.ones(3, requires_grad=True)
        with mock.patch.object(contest, "perf_counter", self.clock.read):
            for _ in range(num_steps):
                sum(self.contest(weight)[0].sum() for _ in range(num_calls)).backward()
                self.clock.now_s += 1.0

    def infer(self, num_calls: int) -> None:
        with mock.patch.object(contest, "perf_counter", self.clock.read), torch.no_grad():
            for number in range(num_calls):
                self.contest(torch.ones(3))
                self.clock.now_s += number % 5  # is not the graph's

    def stays(self) -> str:
        before = self.original.num_calls, self.compiled.num_calls
        self.contest(torch.ones(3))
        return {(1, 0): "original", (0, 1): "compiled"}[
            self.original.num_calls - before[0], self.compiled.num_calls - before[1]
        ]


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize(
    ("original", "compiled", "expected"),
    [
        ((0.2, 0.2), (0.1, 0.1), "compiled"),
        ((0.1, 0.1), (0.2, 0.2), "original"),
        ((0.1, 0.1), (0.1, 0.1), "original"),
        ((0.1, 0.5), (0.2, 0.2), "compiled"),  # slower forward, faster step
        ((0.2, 0.1), (0.1, 0.5), "original"),
    ],
)
def test_the_faster_one_of_whole_steps_stays(original: Any, compiled: Any, expected: str, num_calls: int) -> None:
    judge = _Judge(original, compiled)
    judge.train(MANY, num_calls)
    assert judge.stays() == expected
    assert [found.kind for found in judge.kept] == ["regions" if expected == "compiled" else "eager"]
    assert judge.region.give_up.called == (expected == "original")


@pytest.mark.parametrize(("original", "compiled", "expected"), [(0.2, 0.1, "compiled"), (0.1, 0.2, "original")])
def test_without_gradients_calls_are_compared(original: float, compiled: float, expected: str) -> None:
    judge = _Judge((original,), (compiled,))
    judge.infer(MANY)
    assert judge.stays() == expected


def test_calls_without_a_backward_are_cycles_in_the_end() -> None:
    judge = _Judge((0.1,), (0.2,))
    with mock.patch.object(contest, "perf_counter", judge.clock.read):
        for _ in range(MANY * contest.MAX_CALLS):
            judge.contest(torch.ones(3, requires_grad=True))
    assert judge.stays() == "original"


def test_other_bits_keep_the_original() -> None:
    judge = _Judge((0.2,), (0.1,))
    judge.compiled._scale = 2.0000005
    judge.train(3)
    assert judge.stays() == "original"
    assert "an output (0) differs" in judge.region.give_up.call_args.args[0]
    close = _Judge((0.2,), (0.1,), needs_equal_bits=False)
    close.compiled._scale = 2.0000005
    close.train(MANY)
    assert close.stays() == "compiled"


def test_no_plan_keeps_the_original() -> None:
    judge = _Judge((0.2,), (0.1,), verdict="plain")
    judge.train(3)
    assert judge.stays() == "original"


def test_a_known_verdict_needs_no_turns() -> None:
    judge = _Judge((0.1,), (0.2,), is_known=True)
    judge.train(2)
    assert judge.stays() == "compiled"


def test_an_error_of_the_users_is_his_own_and_counts_once() -> None:
    def fails(value: torch.Tensor) -> Any:
        raise IndexError("of the user's")

    judge = _Judge((0.1,), (0.2,))
    judge.contest = Contest(
        fails, fails, [judge.region], [], needs_equal_bits=True, is_known=False, keep=judge.kept.append, seed=""
    )
    for _ in range(5):
        with pytest.raises(IndexError, match="of the user's"):
            judge.contest(torch.ones(3))


def _compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="hocket", options=options)


def test_ops_of_other_libraries_run_once_a_call() -> None:
    calls = []

    @torch.library.custom_op("hocket_tests::counted", mutates_args=())
    def counted(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return value * 2

    counted.register_fake(torch.empty_like)
    run = _compiled(lambda value: counted(value).sin().cos() + 1)
    for _ in range(30):
        run(torch.ones(3))
    assert len(calls) == 30


def test_turns_do_not_wait_for_forms_that_are_compiled_later() -> None:
    judge = _Judge((0.2, 0.2), (0.1, 0.1))
    judge.region.is_final = False
    judge.train(MANY)
    assert judge.stays() == "compiled"


def test_a_graph_that_is_not_faster_yet_takes_turns_again_with_its_last_forms() -> None:
    judge = _Judge((0.2, 0.2), (0.3, 0.3))
    judge.region.is_final = False
    judge.train(MANY)
    assert judge.stays() == "compiled"  # its regions go on
    judge.compiled._forward_s = 0.01
    judge.region.is_final = True
    judge.train(MANY)
    assert judge.stays() == "compiled"
    assert judge.contest.is_compiled
