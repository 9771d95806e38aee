"""Steps with bookkeeping end scheduled where they end eagerly, bit by bit, and most of them are planned."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import numpy as np
import pytest
import torch

import hocket
from loops.bookkeeping import STEPS, Job
from loops.snapshot import differences, flat, trained

CALLS = 60


def _run(name: str, options: dict[str, Any] | None) -> tuple[dict[str, Any], str, str]:
    """Everything that 60 calls returned, raised, printed and left behind, and the verdict."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the steps draw from it
    torch.manual_seed(0)
    job = Job()
    step = STEPS[name](job)
    model, optimizer = job.state.pop("further", ((), ()))
    models, optimizers = [job.model, model][: 1 + bool(model)], [job.optimizer, optimizer][: 1 + bool(model)]
    call = step if options is None else hocket.schedule(step, models, optimizers, cache=False, **options)
    out, err = io.StringIO(), io.StringIO()
    ended: dict[str, Any] = {}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for n in range(CALLS):
            batch = job.batches[n % 10]
            try:
                result = call(*batch, weight=0.5) if name == "keyword_arguments" else call(batch)
            except Exception as error:  # noqa: BLE001  # compared with what eager raises
                result = (type(error).__name__, str(error))
            flat(result, f"call {n}", ended)
    for each in (*zip(models, optimizers, strict=True),):
        ended |= trained(*each)
    for key, value in job.state.items():
        flat(value() if callable(value) else value, key, ended)
    ended |= {"printed": out.getvalue(), "errors": err.getvalue(), "random": hash(random.getstate())}
    flat(np.random.get_state(legacy=False), "numpy", ended)  # noqa: NPY002
    flat(torch.get_rng_state(), "torch", ended)
    verdict = ("", "") if options is None else (str(call.verdict), call.why)
    if options is not None:
        call.close()
    return ended, *verdict


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """The verdict on each step that was tried."""
    return {}


@pytest.mark.parametrize("name", STEPS)
def test_bookkeeping_ends_as_in_eager(name: str, verdicts: dict[str, str]) -> None:
    expected, _, _ = _run(name, None)
    found, verdicts[name], _ = _run(name, {"guard": False, "machine": hocket.Machine.of(cores=1)})
    assert differences(expected, found) == []


def test_most_are_planned(verdicts: dict[str, str]) -> None:
    planned = [name for name, verdict in verdicts.items() if verdict == "planned"]
    assert len(planned) >= 0.7 * len(verdicts)
