"""Steps that compute with numpy between two ops: each ends as eager does, bit for bit, and most are planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hocket.tracing.raising import OTHER_BRANCH
from hocket.tracing.recording.numpy_calls import (
    CALL_NUMPY,
    NumpyCall,
    NumpyCalls,
    ValueRef,
    as_tensor,
    as_value,
    key_of,
)
from support.twins import Program, captured, ran

TABLE = np.arange(1.0, 5.0, dtype=np.float32)


def returns(losses, out, y, kept):
    """A loop over elements, as for the advantages of reinforcement learning."""
    values = losses.detach().numpy()
    found, run = np.zeros_like(values), 0.0
    for n in reversed(range(len(values))):
        run = values[n] + 0.9 * run
        found[n] = run
    found = (found - found.mean()) / (found.std() + 1e-8)
    return (losses * torch.as_tensor(found)).mean()


def matching(losses, out, y, kept):
    """Hungarian matching of a cost matrix."""
    with torch.no_grad():
        cost = torch.cdist(out[:6], out[6:])
    rows, columns = linear_sum_assignment(cost)
    return (out[torch.as_tensor(rows)] - out[6 + torch.as_tensor(columns, dtype=torch.int64)]).square().mean()


def hard_examples(losses, out, y, kept):
    order = np.argsort(losses.detach().cpu().numpy())[::-1]
    return losses[torch.from_numpy(order[:4].copy())].mean() + losses[order[:2].copy()].sum()


def class_weights(losses, out, y, kept):
    counts = np.bincount(out.argmax(1).numpy(), minlength=4)
    weights = 1.0 / (counts + 1.0)
    return F.cross_entropy(out, y, weight=torch.tensor(weights / weights.sum(), dtype=torch.float32))


def selection(losses, out, y, kept):
    """A part whose size changes, which the step does not ask for."""
    values = losses.detach().numpy()
    return losses.mean() * values[values > np.median(values)].mean()


def clusters(losses, out, y, kept):
    """Elements are written between branches."""
    points = out.detach().numpy()
    centers = points[:3].copy()
    nearest = ((points[:, None] - centers) ** 2).sum(-1).argmin(1)
    for n in range(3):
        if (nearest == n).any():
            centers[n] = points[nearest == n].mean(0)
    return F.mse_loss(out, torch.from_numpy(centers)[torch.from_numpy(nearest)])


def in_place(losses, out, y, kept):
    made = losses.detach().numpy().copy()
    made.sort()
    made[:4], made[made > 1.6] = 0, 2
    np.add.at(made, [0, 0, 1], 0.5)
    made /= made.sum()
    return (losses * torch.FloatTensor(made)).sum()


def types(losses, out, y, kept):
    values = losses.detach().numpy()
    is_usual = isinstance(values, np.ndarray) and isinstance(values.mean(), np.floating)
    return losses.mean() * (2 if is_usual and isinstance(values.astype(float).max(), float) else 1)


def beta(losses, out, y, kept):
    """A number that changes in each step."""
    kept["n"] += 1
    weights = (16 * np.abs(losses.detach().numpy())) ** -min(1.0, 0.4 + 0.01 * kept["n"])
    return (torch.from_numpy(weights / weights.max()) * losses).mean()


def metrics(losses, out, y, kept):
    """Arrays and numbers of numpy's that the step keeps."""
    values = losses.detach().numpy()
    kept["log"].append(values.mean())
    kept["last"].append(values)
    return losses.mean()


def numbers_kept(losses, out, y, kept):
    """Numbers of numpy's and of Python's, of which the next step reads some."""
    values = losses.detach().numpy()
    hits = int((out.argmax(1).numpy() == y.numpy()).sum())
    kept["n"] += hits
    kept["last"].append(values * hits)
    kept["mean"] = 0.9 * kept["mean"] + 0.1 * values.mean(dtype=np.float64)
    kept["log"].append(values.max())
    return (losses * torch.from_numpy(values - np.float32(0.5) * kept["mean"])).mean() * float(values.std())


def shown(losses, out, y, kept):
    values = losses.detach().numpy()
    print("accuracy", (out.argmax(1).numpy() == y.numpy()).mean(), f"{np.exp(values.mean()):.3f}", int(values.argmax()))
    return losses.mean()


def baseline(losses, out, y, kept):
    """A moving average that enters the loss of the step that moves it."""
    kept["n"] = 0.9 * kept["n"] + 0.1 * float(losses.detach().numpy().mean())
    return (losses * (losses.detach() - kept["n"])).mean()


def nearest(losses, out, y, kept):
    points = out.detach().numpy()
    distances = ((points[:, None] - points) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    return (out - out[torch.from_numpy(distances.argmin(1))]).square().mean()


def errors_ignored(losses, out, y, kept):
    values = losses.detach().numpy()
    with np.errstate(divide="ignore"):
        found = 1 / np.where(values > 1.3, values, np.float32(0))
    return (losses * torch.from_numpy(np.where(np.isinf(found), np.float32(0), found))).mean()


def seen_by_its_source(losses, out, y, kept):
    values = losses.detach().numpy()
    return (losses[2:9] * torch.from_numpy(values[2:9])).mean() + losses[:3].sum() * torch.as_tensor(values).mean()


def table(losses, out, y, kept):
    return (losses * torch.from_numpy(TABLE[out.argmax(1).numpy()])).mean()


PLANNED = [
    *(returns, matching, hard_examples, class_weights, selection, clusters, in_place, types, beta, metrics),
    *(errors_ignored, seen_by_its_source, table, numbers_kept, shown, baseline, nearest),
]


def reads_a_table(losses, out, y, kept):
    table = kept.get("table", TABLE)
    return (losses * torch.from_numpy(table[out.argmax(1).numpy()])).mean()


def fills_an_array(losses, out, y, kept):
    made = np.linspace(0, 1, 12).astype(np.float32)
    made[3:6] = losses.detach().numpy()[:3] > 1.4
    return (losses * torch.from_numpy(made)).mean()


def writes_a_tensor(losses, out, y, kept):
    values = losses.detach().numpy()
    values[0] = 0.5
    return losses.mean() + losses.detach().sum() * losses.mean()


def is_written_by_torch(losses, out, y, kept):
    values = losses.detach().numpy() * 2
    part, tensor = values[2:5], torch.from_numpy(values)
    tensor.mul_(3)
    return (losses[:3] * torch.from_numpy(part + 0)).mean()


def writes_what_torch_has(losses, out, y, kept):
    values = losses.detach().numpy() * 2
    tensor = torch.from_numpy(values)
    values += 1
    return (losses * tensor).mean()


def is_read_after_a_write(losses, out, y, kept):
    detached = losses.detach().clone()
    values = detached.numpy()
    detached.mul_(0.5)
    return (losses * torch.from_numpy(values * 2)).mean()


def catches(losses, out, y, kept):
    try:
        found = np.linalg.inv(np.round(losses.detach().numpy()[:9].reshape(3, 3) - 1.3))
    except np.linalg.LinAlgError:
        found = np.eye(3, dtype=np.float32)
    return (losses[:9].reshape(3, 3) * torch.from_numpy(np.tanh(found).astype(np.float32))).mean()


def asks_for_an_index(losses, out, y, kept):
    return losses.mean() + losses[int(losses.detach().numpy().argmax())]


def takes_memory(losses, out, y, kept):
    return (losses * torch.tensor(list(memoryview(losses.detach().numpy() + 1)))).mean()


def calls_back(losses, out, y, kept):
    found = np.apply_along_axis(lambda row: row / row.sum(), 0, losses.detach().numpy())
    return (losses * torch.from_numpy(found.astype(np.float32))).mean()


REFUSED = [
    *(reads_a_table, fills_an_array, writes_a_tensor, is_written_by_torch, writes_what_torch_has),
    *(is_read_after_a_write, catches, asks_for_an_index, takes_memory, calls_back),
]


def program(loss_of: Any) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept: dict[str, Any] = {"n": 0, "mean": np.float64(0), "log": [], "last": []}

    def step(x, y):
        out = model(x)
        loss = loss_of(F.cross_entropy(out, y, reduction="none"), out, y, kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state() -> Any:
        found = [kept["n"], kept["mean"], *kept["log"], *map(torch.from_numpy, kept["last"])]
        assert {type(each) for each in kept["log"]} <= {np.float32}
        assert type(kept["mean"]) is np.float64
        return found

    return Program(step, model, optimizer, state=state)


def batch(number: int) -> Any:
    torch.manual_seed(number)
    return torch.randn(12, 8), torch.randint(4, (12,))


def linear_sum_assignment(cost: Any) -> Any:
    return pytest.importorskip("scipy.optimize").linear_sum_assignment(cost)


@pytest.mark.parametrize("loss_of", PLANNED, ids=lambda each: each.__name__)
def test_a_step_that_computes_with_arrays_is_planned(loss_of):
    captured(lambda: program(loss_of), batch, 40)


@pytest.mark.parametrize("loss_of", REFUSED, ids=lambda each: each.__name__)
def test_a_step_whose_arrays_cannot_be_followed_is_eager(loss_of):
    assert ran(lambda: program(loss_of), batch, 40).verdict == "eager"


def test_a_shape_that_the_step_has_asked_for_is_another_branch():
    def loss_of(losses, out, y, kept):
        values = losses.detach().numpy()
        kept["n"] = len(values[values > 2.6])
        return losses.mean() * (1 + kept["n"])

    ran(lambda: program(loss_of), batch, 40)


def test_the_op_makes_the_calls_of_its_key_and_says_so_where_they_turn_out_otherwise():
    call = NumpyCall(np.add, (ValueRef(1), 2.0), {}, 2, shape=(3,))
    key = key_of(NumpyCalls((call,), ((ValueRef(1), None),), ((ValueRef(2), False),), [None], "train.py:12"))
    (found,) = CALL_NUMPY([torch.ones(3)], key)
    assert found.tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match=OTHER_BRANCH):
        CALL_NUMPY([torch.ones(4)], key)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("key", [np.s_[:], np.s_[::-1], np.s_[:, ::-2], np.s_[1:, ::2], np.s_[1, 2]])
def test_a_tensor_gives_an_array_back_with_its_strides(key, is_copy):
    array = np.arange(12.0).reshape(3, 4)[key]
    found = as_value(*as_tensor(array, is_copy))
    assert type(found) is type(array)
    assert np.array_equal(found, array)
    assert found.strides == array.strides
