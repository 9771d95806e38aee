"""Fuzzer of looking: fused models whose forwards look at things compute what the plain models compute, one by one.

``report(looking_program(17))`` replays one program and shrinks it where it fails. An `InputError` where eager raises
nothing is "loud", which is allowed. Everything else that differs is a failure.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import re
import sys
import tempfile
import traceback
import types
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from hocket.errors import InputError
from loops.alike import attributes, difference, unequal
from loops.looking_programs import Call, Program
from loops.looks import IMPORTS


@dataclass(frozen=True)
class Verdict:
    """End of a program: "right", "loud", "wrong" or "raises", and the line that says why."""

    kind: str
    line: str = ""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in ("wrong", "raises")


class _Side:
    """B models of a program, in a module of their own: its globals, classes and defaults belong to one side."""

    def __init__(self, program: Program, path: Path, name: str) -> None:
        self.program, self.held = program, types.SimpleNamespace()
        spec = importlib.util.spec_from_file_location(f"looks_{name}_{program.seed}", path)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = self.module
        spec.loader.exec_module(self.module)
        self.models: list[Any] = []
        for i in range(program.num_models):
            torch.manual_seed(1000 * program.seed + i)
            self.models.append(self.module.Model(i, self.held))

    def change(self, call: Call, n: int) -> None:
        for k in call.changes:
            getattr(self.module, f"change_{k}")(self.holders(), self.held, n)
        self.train(call.training)

    def holders(self) -> list[Any]:
        """The modules whose attributes the calls read."""
        return self.models

    def train(self, mode: bool) -> None:
        for model in self.models:
            model.train(mode)

    def globals(self) -> dict[str, Any]:
        places = {"": vars(self.module), "Model.": vars(self.module.Model), "held.": vars(self.held)}
        return {
            f"{place}{name}": value
            for place, names in places.items()
            for name, value in names.items()
            if re.fullmatch(r"[A-Za-z]+\d+", name)
        }


class _Plain(_Side):
    """The truth: one model after another, each with its optimizer and, where there are seeds, its own random state."""

    def __init__(self, program: Program, path: Path) -> None:
        super().__init__(program, path, "plain")
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in self.models]
        self.states = [torch.Generator().manual_seed(10 + i).get_state() for i in range(program.num_models)]

    def call(self, call: Call, x: Tensor, y: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {}
        is_own = not self.program.shared
        for i, model in enumerate(self.models):
            if self.program.seeds:
                torch.set_rng_state(self.states[i])
            out = model(x[i] if is_own else x)
            loss = _loss(out, y[i] if is_own else y, self.program.way)
            self.states[i] = torch.get_rng_state()
            if call.grad:
                loss.backward()
            found |= _record(i, out, loss, {name: p.grad for name, p in model.named_parameters()})
        for optimizer in self.optimizers if call.grad else ():
            optimizer.step()
        state = nn.ModuleList(self.models).state_dict()
        return found | {f"state {name}": each.detach().clone() for name, each in state.items()}

    def unfused(self) -> list[Any]:
        return self.models


class _Fused(_Side):
    """The same models by `hocket.fuse`."""

    def __init__(self, program: Program, path: Path) -> None:
        super().__init__(program, path, "fused")
        seeds = [10 + i for i in range(program.num_models)] if program.seeds else None
        self.array = hocket.fuse(self.models, backend=program.backend, seeds=seeds, shared=program.shared)
        self.optimizers = [torch.optim.SGD(self.array.parameters(), lr=0.02)]

    def holders(self) -> list[Any]:
        return self.array._store.templates

    def train(self, mode: bool) -> None:
        self.array.train(mode)

    def call(self, call: Call, x: Tensor, y: Tensor) -> dict[str, Any]:
        array, way = self.array, self.program.way
        out: Any = None
        if way == "losses":
            losses = array.losses(nn.functional.mse_loss, x, y)
        elif way == "loss":
            out = array(x)
            losses = array.loss(nn.functional.mse_loss, out, y)
        else:
            out = array(x)
            losses = sum(each.square().flatten(1).mean(1) for each in pytree.tree_leaves(out))
        if call.grad:
            losses.sum().backward()
        found: dict[str, Any] = {}
        for i in range(self.program.num_models):
            own = None if out is None else pytree.tree_map(lambda leaf, i=i: leaf[i], out)
            found |= _record(i, own, losses[i], self._gradients(i))
        if call.grad:
            self.optimizers[0].step()
        return found | {f"state {name}": each.detach().clone() for name, each in array.state_dict().items()}

    def _gradients(self, i: int) -> dict[str, Tensor | None]:
        array = self.array
        named = {name: None if p.grad is None else p.grad[i] for name, p in array.fused.named_parameters()}
        for block, place in array._store.separate_index.items():
            named |= {f"{block}.{name}": p.grad for name, p in array.separate[place][i].named_parameters()}
        return named

    def unfused(self) -> list[Any]:
        return self.array.unfuse()


def _loss(out: Any, y: Tensor, way: str) -> Tensor:
    if way in ("loss", "losses"):
        return nn.functional.mse_loss(out, y)
    return sum(leaf.square().mean() for leaf in pytree.tree_leaves(out))  # type: ignore[return-value]


def _record(i: int, out: Any, loss: Tensor, gradients: dict[str, Tensor | None]) -> dict[str, Any]:
    leaves = enumerate(filter(torch.is_tensor, pytree.tree_leaves(out)))
    found = {f"output {n} of model {i}": each.detach() for n, each in leaves}
    found[f"loss of model {i}"] = loss.detach()
    return found | {f"gradient {i}.{name}": each for name, each in gradients.items() if each is not None}


STATEFUL = ("writes", "named", "state", "default", "loud")


def judge(program: Program) -> Verdict:
    """Run both sides of a program call by call, up to the first difference.

    Values that differ are computed once more in float64: what differs by rounding differs no longer.
    """
    found = _judged(program, torch.float32)
    if found.kind == "wrong" and "off by" in found.line:
        again = _judged(program, torch.float64)
        return Verdict("right", "rounds") if again.kind == "right" else found
    return found


def _judged(program: Program, dtype: torch.dtype) -> Verdict:
    kept = torch.get_default_dtype(), dict(os.environ), random.getstate(), torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        path = Path(folder) / f"looks_{program.seed}.py"
        path.write_text(program.source)
        torch.set_default_dtype(dtype)
        try:
            return _compared(program, path, dtype)
        finally:
            logging.disable(logging.NOTSET)
            torch.set_default_dtype(kept[0])
            for name in set(os.environ) - set(kept[1]):
                del os.environ[name]
            random.setstate(kept[2])
            torch.set_rng_state(kept[3])
            for name in [name for name in sys.modules if name.startswith("looks_")]:
                del sys.modules[name]


def _compared(program: Program, path: Path, dtype: torch.dtype) -> Verdict:
    plain = _Plain(program, path)
    fused, ended = _tried(lambda: _Fused(program, path), "fuse")
    if ended is not None:
        return ended
    draws = any(use.piece.draws for use in program.uses)
    is_stateful = draws or any(use.piece.group in STATEFUL for use in program.uses)
    for n, call in enumerate(program.calls):
        plain.change(call, n)
        _, ended = _tried(lambda call=call, n=n: fused.change(call, n), f"the change before call {n}")
        if ended is not None:
            return ended
        expected, error = _called(plain, call, n, dtype)
        found, other = _called(fused, call, n, dtype)
        if error is not None:
            if other is None:
                return Verdict("wrong", f"call {n}: eager raises {error!r}, the array does not")
            if is_stateful or "norm" in program.backbone:
                return Verdict("right", "raised")  # models before the one that raised have written what others have not
        elif other is not None:
            return _raised(other, f"call {n}")
        else:
            loose = any(each.autocast for each in program.calls[: n + 1])
            if line := difference(expected, found, draws and not program.seeds, loose):
                return Verdict("wrong", f"call {n}: {line}")
    models, ended = _tried(fused.unfused, "unfuse")
    if ended is not None:
        return ended
    for i, (one, other) in enumerate(zip(plain.models, models, strict=True)):
        if line := unequal(attributes(one), attributes(other)):
            return Verdict("wrong", f"attributes of model {i}: {line}")
    line = unequal(plain.globals(), fused.globals())
    return Verdict("wrong", f"globals: {line}") if line else Verdict("right")


def _tried(act: Any, what: str) -> tuple[Any, Verdict | None]:
    try:
        return act(), None
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
        return None, _raised(error, what)


def _raised(error: Exception, what: str) -> Verdict:
    text = f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    kind = "loud" if isinstance(error, InputError) else "raises"
    return Verdict(kind, text, "".join(traceback.format_exception(error, limit=-5)))


def _called(side: Any, call: Call, n: int, dtype: torch.dtype) -> tuple[dict[str, Any], Exception | None]:
    program = side.program
    models = () if program.shared else (program.num_models,)
    generator = torch.Generator().manual_seed(100 * program.seed + n)
    x = torch.randn((*models, call.rows, 4), generator=generator, dtype=dtype)
    y = torch.randn((*models, call.rows, 3), generator=generator, dtype=dtype)
    x.requires_grad_(program.input_grad)
    random.seed(n)
    np.random.seed(n)  # noqa: NPY002  # the programs draw from it
    torch.manual_seed(n)
    for optimizer in side.optimizers:  # and not after the call, which may have raised
        optimizer.zero_grad()
    try:
        with torch.set_grad_enabled(call.grad), torch.autocast("cpu", enabled=call.autocast):
            found = side.call(call, x, y)
    except Exception as error:  # noqa: BLE001  # eager's has to be the array's
        return {}, error
    return found | ({} if x.grad is None else {"gradient of the input": x.grad}), None


def smallest(failing: Program) -> Program:
    """The program with as few pieces and calls as its failure needs."""
    for k in reversed(range(len(failing.uses))):
        uses = failing.uses[:k] + failing.uses[k + 1 :]
        calls = [
            replace(call, changes=tuple(each - (each > k) for each in call.changes if each != k))
            for call in failing.calls
        ]
        less = replace(failing, uses=uses, calls=tuple(calls))
        failing = less if judge(less).is_failure else failing
    for n in reversed(range(len(failing.calls))):
        less = replace(failing, calls=failing.calls[:n] + failing.calls[n + 1 :])
        failing = less if less.calls and judge(less).is_failure else failing
    return failing


def report(failing: Program) -> str:
    """A failing program, shrunk, as text."""
    less = smallest(failing)
    verdict = judge(less)
    source = less.source.removeprefix(IMPORTS)
    return f"{replace(less, uses=())}\n{source}\n{verdict.kind}: {verdict.line}\n{verdict.detail}"
