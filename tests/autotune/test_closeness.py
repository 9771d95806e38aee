"""The rule of ``numerics="close"``: rewritten forms hold, planted errors are caught, no state is touched."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from equivalence.compare import assert_same
from hocket.autotune import closeness, verification
from hocket.autotune.closeness import MAX_SAMPLES, Closeness, Distance, sample
from hocket.autotune.forms import rewritten
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.float64 import Left, float64_step
from hocket.tracing.program import Action, Call
from hocket.tracing.saved_state import Saved
from hocket.tracing.variants import rewrites_of
from support.captures import closeness as closeness_of
from support.captures import one_lane
from support.steps import training_step, update

aten = torch.ops.aten


@dataclass
class Case:
    """A step that has run, captured in its plain form."""

    step: Callable[[Any], Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]
    plain: Captured

    def rewritten(self, form: str) -> Captured:
        return rewritten(self.plain, form)

    def closeness(self, form: Captured) -> Closeness:
        return closeness_of(self.plain, form, self.step, self.batch)


def case(optimizer: str = "sgd") -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)),
        nn.Linear(8 * 36, 10),
    )
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    else:
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    batch = (torch.randn(8, 3, 6, 6), torch.randint(0, 10, (8,)))
    step = training_step(model, made)
    step(batch)
    return Case(step, model, made, batch, capture_step(step, model, made, batch, split=False))


def altered(captured: Captured, which: Callable[[Call], bool], change: Callable[[Call], Call]) -> Captured:
    """The same captured step, the first call that fits being another one."""
    actions = list(captured.program.actions)
    at = next(n for n, action in enumerate(actions) if which(action.calls[0]))
    calls = (change(actions[at].calls[0]), *actions[at].calls[1:])
    actions[at] = Action(actions[at].name, calls, actions[at].layer, actions[at].grad_mode)
    return replace(captured, program=replace(captured.program, actions=tuple(actions)))


def updates(captured: Captured) -> Callable[[Call], bool]:
    """Return True if a call adds momentum, times a number, to a parameter."""

    def found(call: Call) -> bool:
        return (
            call.func is aten.add_.Tensor and "alpha" in call.kwargs and call.args[1].index in captured.program.inputs
        )

    return found


@pytest.mark.parametrize("optimizer", ["sgd", "Adam", "AdamW", "Adagrad"])
def test_every_rewritten_form_is_close(optimizer: str) -> None:
    found = case(optimizer)
    forms = rewrites_of("", found.plain)
    assert forms[:2] == ("+fused-update", "+channels-last+fused-update")
    assert forms[2:] in ((), ("+channels-last+fused-norm+winograd+fused-update",)), "where the native core can be built"
    for form in forms:
        seen = found.closeness(found.rewritten(form))
        assert seen.holds, (form, seen.why)


def test_a_rate_of_the_past_is_caught_by_moving_it() -> None:
    found = case()
    numbers = found.plain.numbers(found.batch)
    assert numbers is not None

    def stale(call: Call) -> Call:
        return replace(call, kwargs={"alpha": numbers[call.kwargs["alpha"].index]})

    wrong = altered(found.plain, updates(found.plain), stale)
    seen = found.closeness(wrong)
    assert not seen.holds
    assert "weight" in seen.why
    with one_lane(found.plain) as eager, one_lane(wrong) as executor:
        unmoved, _ = sample(found.plain, eager, {"form": executor}, found.batch)
    assert Closeness().and_sample(unmoved["form"]).holds, "a rate that does not move shows nothing"


def has_wrong_mean(momentum: float) -> Callable[[Call], Call]:
    return lambda call: replace(call, args=(*call.args[:6], momentum, *call.args[7:]))


@pytest.mark.parametrize(
    ("op", "change", "where"),
    [
        (aten.add_.Tensor, lambda call: replace(call, kwargs={}), ""),  # an alpha that is dropped
        (aten.native_batch_norm.default, has_wrong_mean(0.11), "running_"),
        (aten.native_batch_norm.default, has_wrong_mean(0.1001), "running_"),
        (aten.bernoulli_.float, lambda call: replace(call, args=(call.args[0], 0.7)), ""),
    ],
)
def test_a_wrong_number_of_an_op_is_caught(op: Any, change: Callable[[Call], Call], where: str) -> None:
    found = case()
    which = updates(found.plain) if op is aten.add_.Tensor else lambda call: call.func is op
    seen = found.closeness(altered(found.plain, which, change))
    assert not seen.holds
    assert where in seen.why


def test_random_numbers_that_are_drawn_in_another_order_are_caught() -> None:
    found = case()

    def step(batch: Any) -> Any:  # channels last without a thought of the first dropout
        return found.step((batch[0].contiguous(memory_format=torch.channels_last), batch[1]))

    wrong = capture_step(step, found.model, found.optimizer, found.batch, split=False)
    assert not found.closeness(wrong).holds


def test_samples_leave_state_random_numbers_and_rates_as_they_are() -> None:
    found = case("Adam")
    before = Saved(found.plain.trace.places.again())
    random = torch.get_rng_state()
    with one_lane(found.plain) as eager, one_lane(found.rewritten("+fused-update")) as executor:
        sample(found.plain, eager, {"form": executor}, found.batch, 0)
    assert_same(list(before.values()), list(before.current()))
    assert torch.equal(random, torch.get_rng_state())
    assert found.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_sample_of_a_training_step_leaves_what_eager_leaves() -> None:
    found = case()
    before = Saved(found.plain.trace.places.again())
    found.step(found.batch)
    expected = Saved(found.plain.trace.places.again())
    before.restore()
    with one_lane(found.rewritten("+channels-last+fused-update")) as executor:
        seen, loss = sample(found.plain, found.step, {"form": executor}, found.batch)
    assert_same(list(expected.values()), list(expected.current()))
    assert loss.requires_grad, "it is the user's own step that returned it"
    assert isinstance(seen["form"], dict)


def test_a_form_that_fails_is_not_close_and_says_why() -> None:
    found = case()

    def broken(batch: Any) -> Any:
        raise RuntimeError("no such kernel")

    seen, _ = sample(found.plain, found.step, {"form": broken}, found.batch)
    assert Closeness().and_sample(seen["form"]).why == "RuntimeError: no such kernel"


def test_an_error_of_eager_in_a_sample_leaves_the_state_as_it_was() -> None:
    found = case()
    before = Saved(found.plain.trace.places.again())

    def broken(batch: Any) -> Any:
        found.step(batch)
        raise RuntimeError("behind the update")

    with pytest.raises(RuntimeError, match="behind the update"):
        sample(found.plain, broken, {}, found.batch, 0)
    assert_same(list(before.values()), list(before.current()))


def test_a_step_that_returns_a_list_of_its_own_state_is_sampled_and_made_once() -> None:
    def trained(**options: Any) -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        counts = [0, 0]

        def step(batch: torch.Tensor) -> list[int]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            counts[1] += 1
            optimizer.step()
            return counts

        run = hocket.schedule(step, model, optimizer, guard=False, cache=False, **options) if options else step
        returned = [run(torch.full((8, 4), 1.0 + number))[1] for number in range(30)]
        if options:
            assert run.verdict == "planned", run.why
        return returned, model.weight.detach()

    expected, weight = trained()
    found, other = trained(numerics="close")
    assert found == expected == list(range(1, 31))
    torch.testing.assert_close(other, weight)


def in_steps(*distances: tuple[float, float], audited: bool = False) -> Closeness:
    """Distances of one gradient, eager's and the form's, step by step."""
    seen = Closeness(audited=audited)
    for eager, form in distances:
        seen = seen.and_sample({"w.grad": Distance("gradient", 1.0, 1e-7, eager, form)})
    return seen


def test_a_form_has_to_be_near_once_and_an_error_never_is() -> None:
    near, far = 1e-6, 1e-2
    assert not in_steps((near, far)).holds
    assert in_steps((near, far), (far, near)).holds
    assert not in_steps(*[(near, far)] * MAX_SAMPLES).holds


def test_one_step_in_which_eager_was_lucky_says_nothing() -> None:
    near, usual = 1e-8, 2e-5
    jumps = [(usual, usual), (usual, usual / 2), (near, usual), (usual / 2, usual), (usual, usual), (usual, usual)]
    assert in_steps(*jumps).holds
    assert not in_steps(*((near, form) for _, form in jumps)).holds
    assert not in_steps(*((eager, 10 * form) for eager, form in jumps)).holds
    mostly_near = [(near, usual)] * 3 + [(usual, usual)] * 3
    assert not in_steps(*mostly_near).holds, "half of eager's steps have no jump"


def test_a_group_says_what_rounding_does_to_a_value_where_eager_was_lucky() -> None:
    usual = {f"w{n}": Distance("gradient", 1.0, 1e-7, 1e-6, 1e-6) for n in range(5)}
    lucky = Distance("gradient", 1.0, 1e-7, 0.0, 3e-6)
    assert Closeness().and_sample({**usual, "lucky": lucky}).holds
    assert not Closeness().and_sample({**usual, "lucky": replace(lucky, group="other")}).holds
    assert not Closeness().and_sample({"w": replace(lucky, form=float("nan"))}).holds


def test_what_only_one_form_reads_is_as_it_was_after_the_other() -> None:
    @dataclass(frozen=True)
    class Constant:
        value: torch.Tensor
        name: str = "constant"
        kind: str = "constant"

        def get(self) -> torch.Tensor:
            return self.value

    truth = Left(((Constant(torch.ones(2)), torch.ones(2, dtype=torch.float64)),), ())
    assert not closeness._wide_problem(truth, Left((), ()))
    written = Left(((Constant(torch.zeros(2)), torch.ones(2, dtype=torch.float64)),), ())
    assert "constant is off by 1" in closeness._wide_problem(written, Left((), ()))


def test_memory_that_is_kept_is_given_back_before_each_float64_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = case(), []
    wide = replace(found.plain)

    def noted(*args: Any, **options: Any) -> Left:
        order.append("float64")
        return float64_step(*args, **options)

    monkeypatch.setattr(closeness, "float64_step", noted)
    monkeypatch.setattr("hocket.autotune.verification.trim_heap", lambda: order.append("heap"))
    monkeypatch.setattr("hocket.native.release_kept_memory", lambda: order.append("lanes"))
    sample(found.plain, found.step, {"form": found.step}, found.batch, wide={"form": wide})
    kept, step = ["lanes", "heap"], ["float64"]
    assert order == [*kept, *step, *kept, *step, *kept, *kept, *kept], "before and after eager's, and at last"


def test_in_float64_a_value_that_is_all_rounding_passes_and_a_wrong_tiny_one_does_not() -> None:
    @dataclass(frozen=True)
    class Gradient:
        name: str
        kind: str = "gradient"

        def get(self) -> torch.Tensor:
            return torch.ones(1)

    def left(**values: float) -> Left:
        return Left(tuple((Gradient(name), torch.tensor([v], dtype=torch.float64)) for name, v in values.items()), ())

    truth = {"first": 0.3, "second": 0.2, "bias_before_norm": 2e-17, "tiny": 3e-7}

    def problem(**changed: float) -> str:
        return closeness._wide_problem(left(**truth), left(**{**truth, **changed}))

    assert not problem(bias_before_norm=-7e-17)
    assert not problem(tiny=3e-7 * (1 + 1e-9))
    assert "tiny is off" in problem(tiny=3e-7 * 1.01)
    assert "first is off" in problem(first=0.3 * (1 + 1e-8))
    assert "bias_before_norm is off" in problem(bias_before_norm=1e-8)


def test_what_a_flipped_relu_does_to_eager_in_one_audit_is_allowed_in_all() -> None:
    usual = (1e-7, 9e-6)
    steps = [usual, (4e-6, 9e-6), *[usual] * (MAX_SAMPLES - 2)]
    assert in_steps(*steps, audited=True).holds
    assert not in_steps(*steps).holds
    assert not in_steps(*((eager, 1e-3) for eager, _ in steps), audited=True).holds
    assert not in_steps(*[usual] * MAX_SAMPLES, audited=True).holds, "eager met none"


@pytest.fixture(scope="module")
def squared() -> Captured:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean())

    return capture_step(step, model, optimizer, torch.randn(64, 64), split=False)


def test_a_float64_step_takes_twice_what_float32_takes(squared: Captured) -> None:
    """Weight and batch, and at least the activation and a gradient, of 64 x 64 elements of 8 bytes each."""
    assert 4 * 64 * 64 * 8 <= closeness.float64_peak_bytes(squared) <= 8 * 64 * 64 * 8


def test_without_room_forms_are_refused_and_nothing_is_run(squared: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> Any:
        raise AssertionError("a step was made")

    needed = closeness.float64_peak_bytes(squared)
    monkeypatch.setattr(verification, "available_bytes", lambda: int(needed * 1.9))
    with pytest.raises(CaptureError, match=r"a step in float64 to compare with would take 0 MiB, and 0 MiB are free"):
        sample(squared, run, {"form": run}, torch.randn(64, 64), 0)
    monkeypatch.setattr(verification, "available_bytes", lambda: int(needed * 2.1))
    with pytest.raises(AssertionError, match="a step was made"):
        sample(squared, run, {}, torch.randn(64, 64), 0)


def test_free_memory_is_what_the_system_says(tmp_path: Path) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal:       100 kB\nMemAvailable:     7 kB\n")
    assert verification.available_bytes(said) == 7 * 1024
    said.write_text("MemTotal:       100 kB\n")
    assert verification.available_bytes(said) is None
    assert verification.available_bytes(tmp_path / "nowhere") is None
