"""Steps that stay eager as a whole: their models and updates run by plan, and nothing else is different."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hocket
from hocket import step_regions
from hocket.errors import InputError
from hocket.session import Schedule
from support.step_regions import MANY, regions_at_once

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.filterwarnings("ignore:::torch")]


class Net(nn.Module):
    """A forward with a buffer that it writes and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.head(self.body(x))


class Training:
    """A step that no graph can be: it hands what the model computes to numpy, between forward and backward.

    Args:
        within: called in each step after the forward, with the training.
    """

    def __init__(self, within: Callable[[Training], object] = lambda training: None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7)
        self.plain_step = vars(self.optimizer)["step"]  # the scheduler's
        self.within = within
        self.seen: list[Any] = []
        self.order = np.random.default_rng(0)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.seen.append(("begun", len(self.seen), random.random()))
        output = self.model(x)
        self.within(self)
        hardest = np.argsort(output.detach().numpy().sum(1))[: len(x) - 1]
        loss = F.cross_entropy(output[self.order.permutation(hardest)], y[: len(hardest)])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.seen.append(("ended", loss.item()))
        return loss.item()

    def state(self) -> list[Any]:
        """All that the training leaves behind, as text or bytes that are equal where everything is."""
        values = [*self.model.state_dict().values(), *(p.grad for p in self.model.parameters())]
        optimizer = self.optimizer.state_dict()
        values += [value for each in optimizer["state"].values() for value in each.values()]
        numbers = [self.model.num_calls, self.seen, str(optimizer["param_groups"]), self.scheduler.last_epoch]
        return [*(value.detach().numpy().tobytes() for value in values), *numbers]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def train(training: Training, step: Callable[..., Any], numbers: range = range(MANY)) -> list[Any]:
    """The result or error of each call, and the random state after all of them."""
    torch.manual_seed(numbers.start)
    random.seed(numbers.start)
    found: list[Any] = []
    for number in numbers:
        try:
            found.append(step(*batch(number)))
        except ValueError as error:
            found.append(str(error))
    return [*found, torch.get_rng_state().tolist(), random.random()]


def scheduled(training: Training, **options: Any) -> Schedule:
    return hocket.schedule(training.step, training.model, training.optimizer, guard=False, cache=False, **options)


def assert_plain(training: Training) -> None:
    assert type(training.model) is Net
    assert not [one for one in training.model.modules() if "_compiled_call_impl" in vars(one)]
    assert not [tensor for tensor in (*training.model.parameters(), *training.model.buffers()) if vars(tensor)]
    assert training.optimizer.step is training.plain_step
    assert list(training.model.state_dict()) == list(Net().state_dict())


def test_a_step_ends_where_eager_ends_and_says_what_kept_it_from_being_one_graph() -> None:
    eager, planned = Training(), Training()
    expected = train(eager, eager.step)
    with regions_at_once():
        fast = scheduled(planned)
        assert train(planned, fast) == expected
    assert fast.verdict == "regions"
    assert "test_regions.py:" in fast.why
    assert "; regions: " in fast.why
    assert "of eager's time" in fast.why
    assert [str(verdict) for verdict in fast.history] == ["eager", "regions"]
    assert planned.state() == eager.state()
    assert_plain(planned)
    following = range(MANY, MANY + 5)
    assert train(planned, fast, following) == train(eager, eager.step, following)
    assert planned.state() == eager.state()
    with pytest.raises(InputError, match="there is no plan"):
        fast.plan  # noqa: B018
    fast.close()


def test_models_and_updates_run_by_plan_and_are_plain_outside_of_the_step() -> None:
    inside: list[Any] = []

    def look(training: Training) -> None:
        copied = copy.deepcopy(training.model)
        pickled = pickle.loads(pickle.dumps(training.model))  # its own
        are_plain = all("_compiled_call_impl" not in vars(one) for one in (copied, pickled))
        inside.append(("_compiled_call_impl" in vars(training.model), are_plain))

    eager, training = Training(), Training(look)
    train(eager, eager.step)
    with regions_at_once():
        fast = scheduled(training)
        train(training, fast)
    assert fast.verdict == "regions"
    assert inside[-1] == (True, True)
    assert len(fast._regions._parts._parts) == 2, "the update is planned, too"
    assert_plain(training)
    for one, other in ((training.model, eager.model), (training.optimizer, eager.optimizer)):
        assert set(vars(one)) == set(vars(other))
        assert len(pickle.dumps(one.state_dict())) == len(pickle.dumps(other.state_dict()))
    assert len(pickle.dumps(training.model)) == len(pickle.dumps(eager.model))
    fast.close()


def test_a_step_that_raises_leaves_all_plain_and_raises_what_eager_raises() -> None:
    def fail(training: Training) -> None:
        if training.model.num_calls % 9 == 8:
            raise ValueError(f"call {training.model.num_calls}")

    eager, planned = Training(fail), Training(fail)
    expected = train(eager, eager.step)
    with regions_at_once():
        fast = scheduled(planned)
        assert train(planned, fast) == expected
        assert fast.verdict == "regions", "an error of the user's is no reason to end regions"
        assert planned.state() == eager.state()
        assert_plain(planned)
        wrong = torch.zeros(8, 5)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fast(wrong, batch(0)[1])
    assert_plain(planned)
    assert fast.verdict == "eager", "this one came through the compiler"
    assert "a step with them raised RuntimeError" in fast.why


def test_what_changes_later_is_done() -> None:
    called: list[str] = []
    eager, planned = Training(), Training()

    def change(training: Training, number: int) -> None:
        if number == 1:
            training.model.body[1].register_forward_hook(lambda *_: called.append("hook"))
        if number == 2:
            training.model.eval()
        if number == 3:
            training.model.train()
            training.model.head.weight.requires_grad_(False)
        if number == 4:
            training.model.head = copy.deepcopy(training.model.head)

    with regions_at_once():
        fast = scheduled(planned)
        assert train(planned, fast) == train(eager, eager.step)
        assert fast.verdict == "regions"
        for number in range(6):
            change(eager, number), change(planned, number)
            following = range(MANY + number, MANY + number + 1)
            assert train(planned, fast, following) == train(eager, eager.step, following), number
    assert len(called) == 10
    assert planned.model.state_dict().keys() == eager.model.state_dict().keys()
    fast.close()


def test_a_scaler_steps_planned_updates() -> None:
    def trained(by_plan: bool) -> tuple[list[float], str]:
        torch.manual_seed(0)
        model, scaler = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            output = model(x)
            loss = F.cross_entropy(output[np.argsort(np.array(output.detach().tolist()).sum(1))], y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        run = hocket.schedule(step, model, optimizer, guard=False, cache=False) if by_plan else step
        losses = [run(*batch(number)) for number in range(MANY)]
        return losses, str(run.verdict) if isinstance(run, Schedule) else "eager"

    with regions_at_once():
        assert trained(by_plan=True) == (trained(by_plan=False)[0], "regions")


def test_another_thread_gets_the_plain_step_and_the_plain_model() -> None:
    def ask(training: Training) -> None:
        asked.append(in_another_thread(lambda: training.model.eval()(batch(0)[0]).sum().item()))
        training.model.train()

    asked: list[float] = []
    eager, planned = Training(), Training(ask)
    with regions_at_once():
        fast = scheduled(planned)
        train(planned, fast)
        assert fast.verdict == "regions"
        parts = fast._regions._parts
        with mock.patch.object(parts, "planned", side_effect=AssertionError):
            planned.within = lambda training: None
            in_another_thread(lambda: fast(*batch(0)))
    assert len(asked) == MANY
    assert type(eager.model) is type(planned.model)
    fast.close()


def in_another_thread(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


class _Clock:
    """A clock that a step moves on, by less or more where its model runs by plan."""

    def __init__(self, plain_s: float, planned_s: float) -> None:
        self.now_s, self._plain_s, self._planned_s = 0.0, plain_s, planned_s

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def pass_step(self, training: Training) -> None:
        is_planned = "_compiled_call_impl" in vars(training.model)
        self.now_s += self._planned_s if is_planned else self._plain_s


@pytest.mark.parametrize(("planned_s", "kind", "words"), [(1.0, "regions", "0.50x"), (4.0, "eager", "2.00x")])
def test_regions_stay_only_where_steps_with_them_are_faster(planned_s: float, kind: str, words: str) -> None:
    clock = _Clock(2.0, planned_s)
    training = Training(clock.pass_step)
    fast = Schedule(training.step, training.model, training.optimizer, clock=clock)
    with regions_at_once(), mock.patch("hocket.dynamo.planned_parts._PlannedUpdate.fits", new=False):
        train(training, fast, range(2 * MANY))
    assert fast.verdict == kind
    assert f"regions: {words} of eager's time" in fast.why
    assert fast.decision.speedup is not None
    assert fast.decision.speedup == pytest.approx(2.0 / planned_s, rel=0.01)
    if kind == "eager":
        pool = fast._pool.active
        assert pool.for_good == pool.eagerly, "it costs nothing any more"
    fast.close()


def test_nothing_is_tried_before_the_program_has_run_for_as_long_as_that_takes() -> None:
    clock = _Clock(step_regions.ATTEMPT_S / 100, 0.0)
    training = Training(clock.pass_step)
    fast = Schedule(training.step, training.model, training.optimizer, clock=clock)
    with mock.patch("hocket.dynamo.planned_parts.PlannedParts", side_effect=NotImplementedError("later")) as made:
        train(training, fast, range(140))
        assert not made.called
        assert fast.verdict == "eager"
        assert "; regions: " not in fast.why
        train(training, fast, range(140, 200))
        assert made.called
    assert fast.why.endswith("; regions: NotImplementedError: later")


def test_a_search_for_regions_can_be_hurried() -> None:
    training = Training()
    with regions_at_once(), mock.patch.object(step_regions, "ATTEMPT_S", 1e9):
        fast = scheduled(training)
        assert not fast.search_regions(), "nothing has been refused"
        train(training, fast)
        assert fast.verdict == "eager"
        assert fast.search_regions()
        train(training, fast, range(MANY, 2 * MANY))
        assert fast.verdict == "regions"
        assert not fast.search_regions()
    fast.close()


def test_without_dynamo_the_step_stays_eager_with_the_reason() -> None:
    training = Training()
    with regions_at_once(), mock.patch.dict(sys.modules, {"hocket.dynamo.planned_parts": None}):
        fast = scheduled(training)
        train(training, fast)
    assert fast.verdict == "eager"
    assert "regions: ModuleNotFoundError" in fast.why


def test_a_model_that_dynamo_fails_on_stays_eager_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    eager, planned = Training(), Training()
    expected = train(eager, eager.step)
    failing = mock.patch("hocket.dynamo.planned_parts.compiled_graph", side_effect=RuntimeError("no such thing"))
    with regions_at_once(), failing:
        fast = scheduled(planned)
        assert train(planned, fast) == expected
    assert fast.verdict == "eager"
    assert "regions: " in fast.why
    assert planned.state() == eager.state()
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo.convert_frame")]
    assert_plain(planned)


def _with_a_hook(training: Training) -> None:
    training.model.head.register_forward_hook(lambda *_: None)


def _compiled(training: Training) -> None:
    training.model.compile(backend="eager")


@pytest.mark.parametrize(
    ("prepare", "options"),
    [
        (_with_a_hook, {}),
        (_compiled, {}),
        (lambda training: None, {"planner": "serial"}),
        (lambda training: None, {"executor": "python"}),
    ],
)
def test_regions_are_not_tried(prepare: Callable[[Training], object], options: dict[str, Any]) -> None:
    training = Training()
    prepare(training)
    with regions_at_once(), mock.patch("hocket.dynamo.planned_parts.PlannedParts", side_effect=AssertionError):
        fast = scheduled(training, **options)
        train(training, fast)
    assert fast.verdict == "eager"
    assert "; regions: " not in fast.why
    assert not fast.search_regions()
    fast.close()
