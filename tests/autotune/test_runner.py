"""Steps as a tuner asks for them: what eager ones have left in the heap is given back before planned ones run."""

import weakref
from contextlib import closing, nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import hocket
from hocket.autotune import runner, verification
from hocket.autotune.candidate import TimedStep
from hocket.autotune.runner import InexactError, StepRunner
from hocket.autotune.verification import verify
from hocket.backends import CpuBackend
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from support.steps import update


@pytest.fixture
def captured() -> Captured:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean())

    step(torch.ones(2, 4))
    return capture_step(step, model, optimizer, torch.ones(2, 4))


def lanes(captured: Captured) -> closing[ThreadLanes]:
    return closing(ThreadLanes(captured, Plan((Lane("main", captured.graph.order, width=1),))))


def test_the_heap_is_trimmed_when_turns_change_and_not_between_eager_steps(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(runner, "trim_heap", lambda: order.append("trimmed"))

    def step(batch: Any) -> Any:
        order.append("eager")
        return captured.step(batch)

    config = cast("Any", SimpleNamespace(step=step, clock=perf_counter))
    made = StepRunner(config, CpuBackend(hocket.Machine.of(cores=1), "auto"))
    with lanes(captured) as executor:
        for planned in (False, False, True, True, False, True):
            made.start()
            made.perform(TimedStep(executor if planned else None), torch.ones(2, 4))
            order += ["planned"] if planned else []
            assert made.is_done
    first = ["eager", "planned"]  # its first step is compared with eager
    assert order == ["eager", "eager", *first, "trimmed", "planned", "eager", "trimmed", "planned"]


def test_a_verified_step_holds_no_memory_of_lanes_beside_eagers(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(verification, "trim_heap", lambda: order.append("heap"))
    monkeypatch.setattr(verification, "release_memory", lambda: order.append("lanes and heap"))

    def eager(batch: Any) -> Any:
        order.append("eager")
        return captured.step(batch)

    with lanes(captured) as executor:

        def planned(batch: Any) -> Any:
            order.append("planned")
            return executor(batch)

        found, _ = verify(captured, planned, [torch.ones(2, 4)], eager=eager)
    assert found.equal
    assert order == ["lanes and heap", "eager", "heap", "planned"]


def test_a_plan_with_other_bits_stays_unproven(captured: Captured) -> None:
    class Off(ThreadLanes):
        """Leaves one parameter an ulp away."""

        def __call__(self, batch: Any) -> Any:
            result = super().__call__(batch)
            weight = captured.trace.places.parameters[0].get().detach()
            weight.copy_(torch.nextafter(weight, torch.ones_like(weight)))
            return result

    config = cast("Any", SimpleNamespace(step=captured.step, clock=perf_counter))
    for bitwise in (True, False):
        made = StepRunner(config, CpuBackend(hocket.Machine.of(cores=1), "auto", bitwise=bitwise))
        with closing(Off(captured, Plan((Lane("main", captured.graph.order, width=1),)))) as executor:
            for _ in range(2):
                made.start()
                with pytest.raises(InexactError, match="other bits than eager") if bitwise else nullcontext():
                    made.perform(TimedStep(executor), torch.ones(2, 4))
                assert made.is_done


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_result_is_the_callers_alone(in_a_list: bool) -> None:
    """A graph of autograd that is held keeps a weight's old shape: the next backward of a resized one would raise."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        if in_a_list:  # a step that is watched meets the list, which might outlive it
            outs = []
            outs.append(out)
        update(optimizer, out.square().mean())
        return out

    fast = hocket.schedule(step, model, optimizer, guard=False, cache=False)
    held = []
    for number in range(30):
        result = weakref.ref(fast(torch.randn(2, 4)))
        is_watched = in_a_list and not fast.decided
        held += [number] if result() is not None and not is_watched else []
    assert fast.verdict == "planned"
    assert not held
    model.weight.data = torch.ones(6, 4)
    model.bias.data = torch.ones(6)
    optimizer.state.clear()
    assert fast(torch.randn(2, 4)).shape == (2, 6)
