"""Random models that differ in all that a forward may read, fused and alone, in double precision.

Each is right or refused by name, by every backend; by which plan ``backend="auto"`` runs is left to chance, so that
every way in which models may run has its turn.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from tests.fusion.oracle import grad_of
from tests.fusion.pieces import PIECES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from hocket.errors import InputError
from hocket.fusion import calls
from hocket.fusion.contest import plans_for

D = torch.float64
QUICK, MANY, BLOCK = 120, 5000, 250
LIMIT = 1e-9


class Fuzzed(nn.Module):
    """A linear layer and some pieces, and one of several kinds of output."""

    def __init__(self, case: random.Random, index: int) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6).double()
        self.pieces = []
        for _ in range(case.randint(1, 4)):
            make = case.choice(PIECES)
            values = [case.randint(1, 4) + case.choice([0.0, 0.25]) for _ in range(3)]
            self.pieces.append(make(self, values[index if case.random() < 0.5 else 0]))
        self.kind = case.choice(["tensor", "tuple", "dict", "number"])

    def forward(self, x: Tensor) -> Any:
        h = self.fc(x)
        for piece in self.pieces:
            h = piece(self, h)
        outs = {"tuple": (h, h.mean(-1)), "dict": {"h": h, "deep": [h.sum(-1)]}, "number": h.square().mean()}
        return outs.get(self.kind, h)


def models_of(seed: int) -> list[nn.Module]:
    num_models = 2 + seed % 2
    found = []
    for index in range(num_models):
        torch.manual_seed(100 * seed + index)
        found.append(Fuzzed(random.Random(seed), index))
    return found


def check_close(fused: Tensor | None, plain: Tensor | None, what: str) -> None:
    if plain is None or fused is None:
        given = fused if plain is None else plain
        assert given is None or not given.any(), f"{what}: only one of them"
        return
    assert fused.shape == plain.shape, what
    assert fused.dtype == plain.dtype, what
    scale = max(float(plain.detach().abs().nan_to_num().max()) if plain.numel() else 0.0, 1e-3)
    error = float((fused - plain).detach().abs().nan_to_num(0.0).max()) if plain.numel() else 0.0
    assert torch.equal(fused.isnan(), plain.isnan()), what
    assert error <= LIMIT * scale, f"{what}: off by {error:.2e} of {scale:.2e}"


def run(seed: int, backend: str) -> str:
    """What came of one case: "right", "refused", or "skipped" where the models fail alone."""
    shared = bool(seed // 2 % 2)
    plain, seeds = models_of(seed), [3 * seed + index for index in range(2 + seed % 2)]
    inputs = [torch.randn(*([] if shared else [len(plain)]), 4, 6, dtype=D) for _ in range(3)]
    expected: list[list[list[Tensor]]] = []
    for index, model in enumerate(plain):
        torch.manual_seed(seeds[index])
        try:
            outs = [pytree.tree_leaves(model(x.clone() if shared else x[index].clone())) for x in inputs]
            sum(out.sin().sum() for each in outs for out in each).backward()  # type: ignore[union-attr]
        except (RuntimeError, TypeError):
            return "skipped"
        expected.append(outs)
    try:
        array = hocket.fuse(models_of(seed), backend=backend, seeds=seeds, shared=shared)
        outs = [pytree.tree_leaves(array(x.clone())) for x in inputs]
        sum(out.sin().sum() for each in outs for out in each).backward()  # type: ignore[union-attr]
    except InputError as error:
        return "refused" if "layer" in str(error) or "model" in str(error) else f"refused without a name: {error}"
    for index, model in enumerate(plain):
        for call, each in enumerate(expected[index]):
            assert len(outs[call]) == len(each)
            for fused, own in zip(outs[call], each, strict=True):
                check_close(fused[index], own, f"output of call {call}, model {index}")
        unfused = array.unfuse()[index]
        for (name, buffer), own in zip(model.named_buffers(), unfused.buffers(), strict=True):
            check_close(own, buffer, f"{name} of model {index}")
        for name, parameter in model.named_parameters():
            check_close(grad_of(array, name, index), parameter.grad, f"gradient of {name}, model {index}")
    return "right"


def fuzz(seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    chance = random.Random(seeds.start)

    monkeypatch.setattr(calls, "plans_for", lambda *given, **options: [chance.choice(plans_for(*given, **options))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            backend = ("auto", "rule", "vmap", "loop")[seed % 4 if seed % 3 else 0]
            try:
                found = run(seed, backend)
                assert found in ("right", "refused", "skipped"), found
                counts[found] += 1
            except Exception as error:
                names = [piece.__qualname__ if hasattr(piece, "__qualname__") else piece for piece in _pieces(seed)]
                raise AssertionError(f"case {seed}, {backend}, {names}: {error}") from error
    return counts


def _pieces(seed: int) -> list[Any]:
    return models_of(seed)[0].pieces  # type: ignore[return-value]


@pytest.mark.parametrize("part", range(4))
def test_random_models_are_right_or_refused(part, monkeypatch):
    counts = fuzz(range(part * QUICK // 4, (part + 1) * QUICK // 4), monkeypatch)
    assert counts["right"] > QUICK // 4 // 2, counts


@pytest.mark.slow
@pytest.mark.parametrize("start", range(QUICK, MANY, BLOCK))
def test_many_random_models_are_right_or_refused(start, monkeypatch):
    counts = fuzz(range(start, min(start + BLOCK, MANY)), monkeypatch)
    assert counts["right"] > sum(counts.values()) // 3, counts
