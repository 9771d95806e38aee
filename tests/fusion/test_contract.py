"""Every rule against torch's own op: signatures, named tuples, writes in place, types, random numbers.

The inputs are those with which torch tests the op (`torch.testing._internal.common_methods_invocations`). Two models
take two inputs; which tensors are each model's own and which all share is varied. A refusal is fine, a wrong result is
not.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from hocket.errors import InputError
from hocket.fusion.rules import find
from quick import some
from tracing.op_samples import op_db

D = torch.float64
SEEDS = (5, 6)
WAYS = ("all own", "first own", "first shared")
QUICK, ALL = 1, 60  # samples of an op
# torch's own results are in memory that was never written, or any one of several values that go to one place (the
# samples of `max_unpool2d_grad` and its like have none such).
SKIPPED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"} | {
    f"nn.functional.max_unpool{n}d" for n in (1, 2, 3)
}


@functools.cache
def per_op() -> dict[str, Any]:
    """All ops that torch tests, by name; to load them takes as long as many of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {op.full_name if op.variant_test_name else op.name: op for op in op_db()}


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The op as a function, as a method, and in place, where a rule is found by its name."""
    method: Any = op.method_variant
    for kind, function in (("function", op.op), ("method", method)):
        if function is not None and find(function) is not None:
            yield kind, function
    inplace = op.inplace_variant
    if inplace is not None and find(inplace) is not None:

        def write(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            x = x * 1
            return inplace(x, *args, **kwargs), x

        yield "in place", write


@functools.cache
def names() -> list[str]:
    """Those ops that have a rule, and double precision."""
    if D not in per_op()["add"].dtypes:
        pytest.skip("torch tests no double precision here")
    having = {name: op for name, op in per_op().items() if D in op.dtypes and name not in SKIPPED}
    return [name for name, op in having.items() if any(True for _ in variants(op))]


class Call(nn.Module):
    """One call of an op, with tensors of its own and tensors that all models share."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], spec: Any, own: list[int]) -> None:
        super().__init__()
        self.function, self.leaves, self.spec, self.own = function, leaves, spec, own

    def forward(self, own: list[Tensor], shared: list[Tensor]) -> Any:
        leaves, rest = list(self.leaves), iter(shared)
        given = dict(zip(self.own, own, strict=True))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[place] = given[place] if place in given else next(rest)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def other(tensor: Tensor) -> Tensor:
    """The second model's tensor in place of a tensor."""
    tensor = tensor.detach()
    if tensor.ndim == 0:
        return tensor * 0.5 if tensor.is_floating_point() else tensor.clone()
    return tensor.roll(1, -1).clone()


def differs(fused: Any, plain: Any) -> str | None:
    """Difference of one model's result from the plain one, if any."""
    if type(fused) is not type(plain) and not isinstance(plain, (Tensor, int)):
        return f"{type(fused).__name__}, not {type(plain).__name__}"
    for a, b in itertools.zip_longest(pytree.tree_leaves(fused), pytree.tree_leaves(plain)):
        if not isinstance(b, Tensor):
            if a != b:
                return f"{a!r}, not {b!r}"
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        elif not torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True):
            return "other values"
    return None


def gradients(out: Any, tensors: list[Tensor], model: int | None = None) -> list[Tensor | None]:
    """Gradients of the sum of all outputs that have some, for one model's part of a fused output."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    ends = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not ends or not wanted:
        return []
    total = sum((end if model is None else end[model]).double().sin().sum() for end in ends)
    return list(torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True))


def outcome(function: Callable[..., Any], sample: Any, way: str) -> str:
    """Outcome of fusing one call: "right", "refused", "skipped", or the fault."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    own = {"all own": tensors, "first own": tensors[:1], "first shared": tensors[1:]}[way]
    if not own or (way == "first own" and len(tensors) == 1) or any(leaves[i].layout != torch.strided for i in tensors):
        return "skipped"
    first = [leaves[place].detach().clone() for place in own]
    pairs = [torch.stack([a, other(a)]).requires_grad_(a.dtype.is_floating_point) for a in first]
    shared = [leaves[place] for place in tensors if place not in own]
    plain: list[Any] = []
    expected: list[Any] = []
    for index, seed in enumerate(SEEDS):
        mine = [pair[index].detach().requires_grad_(pair.requires_grad) for pair in pairs]
        torch.manual_seed(seed)
        try:
            plain.append(Call(function, leaves, spec, own)(mine, [each.detach().clone() for each in shared]))
            expected.append(gradients(plain[-1], mine))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return "skipped"
    models = [Call(function, leaves, spec, own) for _ in SEEDS]
    array = hocket.fuse(models, backend="rule", seeds=SEEDS, shared={"own": False, "shared": True})
    try:
        out = array(pairs, [each.detach().clone() for each in shared])
        for index in range(len(SEEDS)):
            mine = pytree.tree_map_only(Tensor, lambda leaf, index=index: leaf[index], out)
            if (what := differs(mine, plain[index])) is not None:
                return f"model {index}: {what}"
            for pair, grad in zip(gradients(out, pairs, index), expected[index], strict=True):
                if (pair is None) is not (grad is None) and (pair if grad is None else grad).any():
                    return f"model {index}: gradients of other tensors"
                if pair is not None and grad is not None and (what := differs(pair[index], grad)) is not None:
                    return f"model {index}: gradient: {what}"
    except InputError:
        return "refused"
    return "right"


def check_op(name: str, num_samples: int, ways: Sequence[str] = WAYS) -> Counter[str]:
    """Outcomes of some samples of an op, in the first of the ways in which they can be taken."""
    op = per_op()[name]
    counts: Counter[str] = Counter()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = itertools.islice(op.sample_inputs("cpu", D, requires_grad=False), num_samples)
        for number, sample in enumerate(samples):
            seen: set[Any] = set()
            for kind, function in variants(op):
                if num_samples == QUICK and kind != "in place" and find(function) in seen:
                    continue  # a method and a function by one rule
                seen.add(find(function))
                for way in ways:
                    found = outcome(function, sample, way)
                    assert found in ("right", "refused", "skipped"), (name, kind, way, number, found)
                    counts[found] += 1
                    if num_samples == QUICK and found != "skipped":
                        break
    return counts


@pytest.mark.parametrize("part", some(range(8), every=4))
def test_rules_compute_what_the_op_computes(part):
    counts: Counter[str] = Counter()
    for number, name in enumerate(names()):
        if number % 8 == part:
            turn = number % len(WAYS)
            counts += check_op(name, QUICK, WAYS[turn:] + WAYS[:turn])
    assert counts["right"] > 4 * counts["refused"], counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(64))
def test_rules_compute_what_the_op_computes_on_all_samples(part):
    for name in names()[part::64]:
        check_op(name, ALL)
