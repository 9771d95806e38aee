"""Alternatives to an eager step: compiled by torch, or scheduled. And two models that the zoo does not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch._dynamo
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks.turns import Elsewhere, answer, in_turns, summaries
from hocket import zoo
from hocket.errors import HocketError, InputError
from hocket.job import Job
from hocket.session import Schedule, schedule

Step: TypeAlias = Callable[[Any], Any]
WARM_UP = 4  # steps of a block that are not counted

# The limit is for one Python function: `critical_path` compiles steps of several networks, sizes and modes in one
# process. Steps beyond the limit would run eagerly, which is an error here.
torch._dynamo.config.recompile_limit = 64
torch._dynamo.config.fail_on_recompile_limit_hit = True


def decided(job: Job, numerics: str, *, compiled: bool = False) -> Schedule:
    """A schedule of a fresh job that has decided, and is neither audited nor looked at while it is measured.

    With `compiled` it has decided once more, with compiled forms as well.
    """
    fast = schedule(job.step, job.model, job.optimizer, numerics=numerics, cache=False)
    until_decided(fast, job)
    if compiled and fast.compile():
        until_decided(fast, job)
    for upkeep in fast._pool.current._upkeep:
        upkeep.due = sys.maxsize
    return fast


def eager_step(job: Job) -> tuple[Step, dict[str, Any]]:
    """The job's step as it stands."""
    return job.step, {}


def scheduled_step(job: Job, numerics: str, compiled: bool = False) -> tuple[Step, dict[str, Any]]:
    """The step of `decided`, with its verdict."""
    fast = decided(job, numerics, compiled=compiled)
    return fast, {"verdict": str(fast.verdict), "why": fast.why}


def serve(pipe: Any, job_of: Callable[[str], Job], target: str, step_of: Callable[..., Any], *way: Any) -> None:
    """Make the step of a job in this process, and the steps that are asked for (see `benchmarks.turns.Elsewhere`).

    `step_of` returns the step, or None if there is none, and what is said about it.
    """
    job = job_of(target)
    step, said = step_of(job, *way)
    answer(pipe, said, step, job.batch)


def compared(
    ways: Mapping[str, tuple[Any, ...]],
    job_of: Callable[[str], Job],
    target: str,
    rounds: int,
    block: int,
    others: Mapping[str, Callable[[], Elsewhere]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return summaries of contenders in turns, each in its process, and what each said about itself.

    `ways` are a function for `serve` and its arguments by label. A contender with a text ``failed`` takes no part. They
    start one after the other, `others` last: a search beside another one would be disturbed.
    """
    here: dict[str, Callable[[], Elsewhere]] = {
        label: partial(Elsewhere, serve, job_of, target, *way) for label, way in ways.items()
    }
    with ExitStack() as stack:
        made: dict[str, Elsewhere] = {}
        for label, start in {**here, **others}.items():
            made[label] = start()
            stack.callback(made[label].end)
        able = {label: each for label, each in made.items() if "failed" not in each.said}
        found = summaries(in_turns(able, rounds=rounds, block=block, warm_up=WARM_UP))
    return {**found, "said": {label: each.said for label, each in made.items() if each.said}}


def until_decided(fast: Schedule, job: Job, at_most: int = sys.maxsize) -> int:
    """Call the schedule until it has decided, and return how often."""
    calls = 0
    while not fast.decided and calls < at_most:
        fast(job.batch(calls))
        calls += 1
    return calls


def is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


def _channels_last(value: Any) -> Any:
    return value.contiguous(memory_format=torch.channels_last) if is_image(value) else value


def compiled_step(
    job: Job, update: bool, last: bool, mode: str | None = None, **backend: Any
) -> tuple[Step | None, dict[str, Any]]:
    """Return the job's step with its models (and their update) compiled, or None if that fails, and the compiler's
    report.

    With `last`, models and images have their channels last; `mode` and `backend` are those of `torch.compile`.
    """
    torch._dynamo.utils.counters.clear()

    def step(batch: Any) -> Any:
        return job.step(tree_map(_channels_last, batch) if last else batch)

    for model in job.models:
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Not `model.compile()`: in torch 2.13 it leaves the call as it was and compiles nothing, without a word.
        # Every batch has the same shape; left to guess, it makes dynamic kernels for DCGAN, and fails on them.
        model.forward = torch.compile(model.forward, dynamic=False, mode=mode, **backend)
    for optimizer in job.optimizers if update else ():
        optimizer.step = torch.compile(optimizer.step, **backend)  # type: ignore[assignment, method-assign]
    start = perf_counter()
    try:
        for number in range(3):
            step(job.batch(number))
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is its result)
        first = (str(error).strip().splitlines() or [""])[0]
        return None, {"failed": f"{type(error).__name__}: {first}"}
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"].get("unique_graphs", 0)
    if not graphs:
        raise HocketError(f"torch.compile compiled nothing of {job.name!r}; it is no baseline")
    return step, {
        "graphs": graphs,
        "graph_breaks": dict(counters["graph_break"]),
        "recompiles": sum(counters["recompiles"].values()) if "recompiles" in counters else 0,
        "seconds": perf_counter() - start,
    }


# The width, depth, heads, steps and characters of nanoGPT's model for CPUs (github.com/karpathy/nanoGPT, README).
OPTIONS: dict[str, dict[str, Any]] = {"transformer": {"width": 128, "depth": 4, "heads": 4, "steps": 64, "vocab": 65}}


def job_of(target: str) -> Job:
    """Make the job of a target: a zoo name, ``NAME/BATCH``, ``gpt2`` or ``convmixer``."""
    name, _, batch_size = target.partition("/")
    if name in OWN:
        return OWN[name]()
    if batch_size and not batch_size.isdecimal():
        raise InputError(f"{target}: expected NAME or NAME/BATCH")
    size: dict[str, Any] = {"batch_size": int(batch_size)} if batch_size else {}
    return zoo.load(name, **OPTIONS.get(name, {}), **size)


def gpt2(width: int = 64) -> Job:
    """A GPT-2 of four layers with random weights, trained by AdamW. Needs transformers."""
    import transformers

    torch.manual_seed(0)
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": width, "n_positions": 16, "vocab_size": 2 * width}
    config = transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return language_job(model, optimizer, [torch.randint(3, 2 * width, (2, 16)) for _ in range(3)])


def language_job(
    model: nn.Module, optimizer: torch.optim.Optimizer, words: Sequence[torch.Tensor], name: str = ""
) -> Job:
    """The training of a language model that computes its own loss, on these words."""

    def loss_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    batches = [{"input_ids": each, "labels": each.clone()} for each in words]
    return Job(_step_by(optimizer, loss_of), model, optimizer, batches, name=name)


def classifier_job(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    name: str = "",
) -> Job:
    """The training of a model on inputs and labels, by their cross entropy."""

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Job(_step_by(optimizer, loss_of), model, optimizer, batches, name=name)


def _step_by(optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def convmixer(width: int = 32, depth: int = 4) -> Job:
    """A ConvMixer (Trockman and Kolter 2022) on small images, trained by AdamW."""
    torch.manual_seed(0)

    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    def norm() -> tuple[nn.Module, nn.Module]:
        return nn.GELU(), nn.BatchNorm2d(width)

    blocks = [
        nn.Sequential(
            Residual(nn.Conv2d(width, width, 5, groups=width, padding="same"), *norm()),
            nn.Conv2d(width, width, 1),
            *norm(),
        )
        for _ in range(depth)
    ]
    stem, head = (nn.Conv2d(3, width, 4, stride=4), *norm()), (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*stem, *blocks, *head, nn.Linear(width, 10)).train()
    batches = [(torch.randn(8, 3, 32, 32), torch.randint(10, (8,))) for _ in range(3)]
    return classifier_job(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches)


OWN: dict[str, Callable[[], Job]] = {"gpt2": gpt2, "convmixer": convmixer}
