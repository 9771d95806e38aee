"""Ops of torch's own tests as training steps: scheduled, or compiled by the backend, they are eager steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import hocket
from tracing.op_samples import op_db

CHUNKS = 16
SAMPLES = 2  # calls of each op and type of numbers
DTYPES = (torch.float32, torch.float64)
# Ways to plan steps, the references that they may be equal to, and steps past the verdict.
WAYS = {"schedule": (("eager",), 26), "hocket": (("eager", "aot_eager"), 7)}
UNWRITTEN = ("empty", "new_empty")  # what they give is what memory held


class Call(nn.Module):
    """One call of an op: its tensors of floating point are parameters, the others a batch."""

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.op = op
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        values = [leaves[n].detach().clone() for n in self.places]
        self.learned = [value.is_floating_point() and value.layout == torch.strided for value in values]
        pairs = list(zip(values, self.learned, strict=True))
        self.weights = nn.ParameterList([nn.Parameter(value) for value, learned in pairs if learned])
        self.batch = [value for value, learned in pairs if not learned]

    def forward(self, batch: list[torch.Tensor]) -> Any:
        # Times one: an op may write to its inputs, which a leaf does not take.
        weights, others, leaves = iter(self.weights), iter(batch), list(self.leaves)
        for n, learned in zip(self.places, self.learned, strict=True):
            leaves[n] = next(weights) * 1 if learned else next(others)
        args = tree_unflatten(leaves, self.spec)
        return self.op(args[0], *args[1], **args[2])


def trained(how: str, steps: int, op: Any, sample: Any) -> tuple[list[Any], str]:
    """All values of a training, and its verdict. ``how``: eager, schedule, or a backend of `torch.compile`."""
    torch.manual_seed(0)
    model = Call(op, sample)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)] if len(model.weights) else []
    forward: Any = model
    if how not in ("eager", "schedule"):
        torch._dynamo.reset()
        forward = torch.compile(model, backend=how)

    def step(batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = forward(batch)
        losses = [
            (each.abs() if each.is_complex() else each).double().square().sum()
            for each in tree_flatten(out)[0]
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        if losses and optimizers:
            sum(losses).backward()
            optimizers[0].step()
        return out

    run: Any = step
    if how == "schedule":
        run = hocket.schedule(step, model, *optimizers, planner="serial", guard=False, cache=False)
    found: list[Any] = []
    for _ in range(steps):
        outs = tree_flatten(run([value.clone() for value in model.batch]))[0]
        found.append([each.detach().clone() if isinstance(each, torch.Tensor) else each for each in outs])
    verdict = str(run.verdict) if how == "schedule" else how
    if how == "schedule":
        run.close()
    gradients = [weight.grad for weight in model.weights]
    return [*found, [weight.detach() for weight in model.weights], gradients, torch.get_rng_state()], verdict


def is_same(one: Any, other: Any) -> bool:
    """Equal to the bit, in type and in shape; strides count where a dimension has more than one element."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not isinstance(one, torch.Tensor):
        return one == other or (one != one and other != other)
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    strides = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (one, other)]
    if one.numel() and strides[0] != strides[1]:
        return False
    if one.is_complex():
        one, other = (torch.view_as_real(x.resolve_conj()) for x in (one, other))
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def samples_of(chunk: int) -> Iterator[tuple[str, Any, Any]]:
    """Some calls of some ops, with the name of each, of which eager itself ends twice with the same bits."""
    for info in op_db()[chunk::CHUNKS]:
        for dtype in DTYPES if not info.name.startswith(UNWRITTEN) else ():
            if dtype not in info.supported_dtypes("cpu"):
                continue
            torch.manual_seed(1)
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=False))
            for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
                yield f"{info.full_name} {dtype}", info.op, sample


def result_or_none(*call: Any) -> Any:
    """Return what a training ends with, or None where the op raises by itself."""
    try:
        return trained(*call)[0]
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, torch._dynamo.exc.TorchDynamoException):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_torchs_own_tests_is_eager_to_the_bit(chunk, how):
    references, steps = WAYS[how]
    problems, verdicts = [], []
    for name, op, sample in samples_of(chunk):
        expected = result_or_none("eager", steps, op, sample)
        if expected is None or not is_same(expected, result_or_none("eager", steps, op, sample)):
            continue  # it draws numbers that no seed gives, or writes what memory held
        if None in [result_or_none(reference, steps, op, sample) for reference in references[1:]]:
            continue  # torch.compile itself does not take it
        found, verdict = trained(how, steps, op, sample)
        verdicts.append(verdict)
        if not any(is_same(result_or_none(reference, steps, op, sample), found) for reference in references):
            problems.append(name)
    assert not problems
    assert sum(verdict != "eager" for verdict in verdicts) >= 0.8 * len(verdicts) > 20
