"""Steps over channels that are late, early, out of order, or fail, at random: each computes what it should, or ends
with an error that says why; none hangs.
"""

import heapq
import random
import re
import threading
import time
from itertools import count

import pytest
import torch
from torch import nn

from execution.parted import batches, captured_of, plan_of, training, worker_of
from execution.probe import KINDS
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.ir import Lane, Plan
from support.refusals import fails

NUM_STEPS = 8  # steps of the same number modulo this have the same parameters and the same batch
BATCHES = batches(NUM_STEPS)
TOO_NARROW = (torch.randn(6, 3).double(), BATCHES[0][1])


class Whole:
    """Results of the steps: for each its parameters, loss and gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters, self.losses, self.gradients = [], [], []
        for x, y in BATCHES:
            for parameter in model.parameters():
                parameter.data.mul_(0.9).add_(0.01)
            model.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            self.losses.append(loss.detach())
            self.parameters.append({name: value.detach().clone() for name, value in model.named_parameters()})
            self.gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})


class RandomChannel:
    """Transfers arrive after a random time, some at once and on the thread that begins them; some fail."""

    def __init__(self, whole: Whole, seed: int, runs_ahead: bool) -> None:
        self.whole, self.runs_ahead, self.runs_behind = whole, runs_ahead, False
        self.problems: list[str] = []
        self.has_failed = False
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._due: list = []
        self._number = count()
        threading.Thread(target=self._serve, daemon=True).start()

    def begin(self, op, tensor, epoch, done) -> None:
        with self._changed:
            chance = self._chance.random()
            if chance < 0.002:
                self.has_failed = True
                raise OSError("not begun")
            is_lost = chance < 0.004
            at = time.monotonic() + self._chance.choice([0.0, 0.0, 1e-4, 1e-3]) * self._chance.random()
            if chance < 0.7:
                heapq.heappush(self._due, (at, next(self._number), (op, tensor, epoch, done, is_lost)))
                self._changed.notify_all()
                return
        self._arrive(op, tensor, epoch, done, is_lost)

    def close(self) -> None:
        with self._changed:
            self._due.insert(0, (-1.0, -1, None))
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                _, _, transfer = heapq.heappop(self._due)
            if transfer is None:
                return
            self._arrive(*transfer)

    def _arrive(self, op, tensor, epoch, done, is_lost) -> None:
        if is_lost:
            self.has_failed = True
            done(ConnectionResetError("lost"))
            return
        way, _, name = op.partition(":")
        if way == "recv":
            tensor.copy_(self.whole.parameters[epoch % NUM_STEPS][name])
        else:
            gradient = self.whole.gradients[epoch % NUM_STEPS][name.removesuffix(".grad")]
            if not torch.equal(tensor.reshape(gradient.shape), gradient):
                self.problems.append(f"{op} of step {epoch}")
        done(None)


def random_plan(part, chance: random.Random) -> Plan:
    made = plan_of(part, "worker0", "server", cores=chance.randint(1, 3))
    lanes = [
        Lane(lane.name, tuple(chance.sample(lane.ops, len(lane.ops))), lane.kind, lane.device)
        if lane.kind == "channel"
        else lane
        for lane in made.lanes
    ]
    return Plan(tuple(lanes))


def result_or_error(running, batch) -> torch.Tensor | BaseException:
    try:
        return running(batch)
    except (ExecutionError, RuntimeError) as error:
        return error


def run_until_it_fails(part, whole: Whole, kind: str, chance: random.Random, runs_ahead: bool, max_steps: int) -> int:
    """Number of steps that one executor ran."""
    channel = RandomChannel(whole, chance.randrange(1 << 30), runs_ahead)
    channels = {"worker0->server": channel, "server->worker0": channel}
    running = executor(part, random_plan(part, chance), kind=kind, channels=channels)
    steps = 0
    for steps in range(1, max_steps + 1):
        batch = TOO_NARROW if chance.random() < 0.01 else BATCHES[steps % NUM_STEPS]
        found = result_or_error(running, batch)
        if isinstance(found, torch.Tensor):
            assert batch is not TOO_NARROW
            assert torch.equal(found, whole.losses[steps % NUM_STEPS]), f"step {steps}"
            continue
        if isinstance(found, ExecutionError):
            assert channel.has_failed, found
            assert re.search(r"failed: (OSError: not begun|ConnectionResetError: lost)$", str(found)), found
        else:
            assert batch is TOO_NARROW, found
            assert "addmm" in str(found.__notes__), found
        fails(ExecutionError, r"failed: |a step was left while transfers were under way", running, BATCHES[0])
        break
    running.close()
    channel.close()
    assert not channel.problems
    return steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("total", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_random_steps(kind, runs_ahead, total):
    found = training()
    found.step(BATCHES[0])
    part = worker_of(captured_of(found, BATCHES[0]))
    twin = training()
    whole = Whole(twin.model)
    problems: list[BaseException] = []

    def run():
        chance, left = random.Random(total), total
        try:
            while left > 0:
                left -= run_until_it_fails(part, whole, kind, chance, runs_ahead, min(left, 60))
        except BaseException as error:  # noqa: BLE001 (raised below)
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)  # one that hangs is left behind
    thread.start()
    thread.join(240)
    assert not thread.is_alive(), "a step hangs"
    if problems:
        raise problems[0]
