"""Two hundred steps, eager here and by a critical-path plan there: the same loss after every one of them."""

import pytest
import torch

from equivalence.compare import assert_same, everything, twins
from equivalence.test_critical_path import on_cores
from execution.probe import KINDS
from hocket.execution import executor
from hocket.tracing.capturing import capture_step
from hocket.zoo import load
from quick import covering, some

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 200
LARGER = ("lenet", "digits-cnn", "transformer")


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)], some(KINDS[::-1])),
)
def test_loss_curves_agree(name, kind):
    # Seven batches, so that a later one is not always seen after the same one before it.
    pair = twins(lambda: load(name, batch_size=8, num_batches=7), scheduler=lambda optimizer: None)
    for job in pair.both():
        torch.manual_seed(0)
        job.step(job.batch(0))
    captured = capture_step(pair.planned.step, pair.planned.model, pair.planned.optimizer, pair.planned.batch(0))
    made = on_cores(captured)
    assert len(made.lanes) > 1
    planned = executor(captured, made, kind=kind)
    curves: dict[str, list[float]] = {"eager": [], "planned": []}
    for number in range(1, STEPS + 1):
        for label, step, job in (("eager", pair.eager.step, pair.eager), ("planned", planned, pair.planned)):
            torch.manual_seed(number)
            curves[label].append(step(job.batch(number)).item())
    planned.close()
    assert curves["planned"] == curves["eager"]
    assert_same(everything(pair.eager), everything(pair.planned))
    first, last = sum(curves["eager"][:14]), sum(curves["eager"][-14:])
    assert last < 0.9 * first, "nothing was learnt, so there was little to compare"
