"""What a call of a schedule takes beyond the ops of its plan: signature, guards, reading and putting back.

    python -m benchmarks call mlp gpt2 -o call.json

A call's time is compared with what the native core took for that same call's ops (from the first wake-up to the end
of the last lane), so that slow and fast moments of a machine cancel. Plans are serial, on one lane of one thread. A
`-tiny` target has as many ops as its large sister, but hardly any work in them: its caches stay warm, and what is left
of a call is the schedule's own code. Audits are rare enough not to show in a quartile.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

import hocket
from hocket import zoo
from hocket.execution.base import Executor
from hocket.ir import Machine
from hocket.job import Job
from hocket.reporting import lower_quartile
from hocket.tracing.signature import Signatures, signature_of

__all__ = ["TARGETS", "bar_us", "gpt2", "measure", "run"]

TINY: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"width": 8, "batch_size": 2},
    "transformer": {"width": 16, "batch_size": 1, "steps": 4, "vocab": 20},
}
TARGETS = ("digits-cnn", "lenet", "mlp", "mlp-tiny", "lstm-cells", "transformer", "gpt2", "gpt2-tiny")
WARM_UP = 10


def bar_us(num_ops: int) -> float:
    """What a call may take beyond its ops."""
    return 15.0 + 0.02 * num_ops


def run(
    targets: tuple[str, ...] = TARGETS,
    rounds: int = 300,
    *,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure each target, see `measure`; `save` is called with the result so far after each."""
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": Machine.here().cores,
        "torch": torch.__version__,
        "targets": {},
    }
    for target in targets:
        result["targets"][target] = measure(target, rounds)
        save(result)
    return result


def measure(target: str, rounds: int = 300) -> dict[str, Any]:
    """One target: a call of its schedule, and each part of one, in turns, `rounds` times.

    Returns:
        ``ops``, ``parameters`` and ``tape`` (entries of it); ``ops_us``, the median of what the ops take; ``bar_us``;
        ``call_us``, what a call takes beyond its ops; of that ``executor_us``, in which the executor begins and
        finishes, ``signature_us`` and ``guards_us``, each after a step, and ``rest_us``, what these do not explain;
        ``python_us`` and ``described_us``, what executor and signature take by the Python way, which is kept for what
        the native core does not recognise. All are lower quartiles; ``best`` has the smallest values, which say what
        the code takes where other programs keep the machine busy.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # no thread waits for another
    try:
        return _measure(target, _job(target), rounds)
    finally:
        torch.set_num_threads(usual)


def _measure(target: str, job: Job, rounds: int) -> dict[str, Any]:
    options: dict[str, Any] = {"guard": False, "planner": "serial", "machine": Machine.of(cores=1), "cache": False}
    fast = hocket.schedule(job.step, job.model, job.optimizer, **options)
    calls = 0
    while not fast.decided or calls < WARM_UP:
        fast(job.batch(calls))
        calls += 1
    found = fast.candidate
    assert found is not None, f"{target}: {fast.why}"
    executor, variant = found.executor, fast._pool.current
    assert variant.guards is not None
    signatures, places, live = Signatures(), fast._pool.config.places, fast._pool.config.watch.live_leaves
    times: dict[str, list[float]] = {"ops": []}

    def beyond(name: str, step: Callable[[Any], Any], batch: Any) -> None:
        start = perf_counter_ns()
        step(batch)
        took = perf_counter_ns() - start
        inside = executor._core.took_ns()  # type: ignore[attr-defined]
        times.setdefault(name, []).append((took - inside) / 1e3)
        times["ops"].append(inside / 1e3)

    def alone(name: str, part: Callable[[], Any]) -> None:
        start = perf_counter_ns()
        part()
        times.setdefault(name, []).append((perf_counter_ns() - start) / 1e3)

    for number in range(rounds + WARM_UP):
        batch = job.batch(number)
        beyond("call", fast, batch)
        beyond("executor", executor, batch)
        alone("signature", partial(signatures.of, places, batch, live))
        alone("guards", variant.guards.hold)
        beyond("python", partial(Executor.__call__, executor), batch)
        alone("described", partial(signature_of, places, batch, live))
    fast.close()
    counted = {name: values[WARM_UP:] for name, values in times.items()}
    parts = {name: lower_quartile(values) for name, values in counted.items() if name != "ops"}
    ops = len(found.captured.graph)
    return {
        "ops": ops,
        "parameters": len(places.parameters),
        "tape": len(found.captured.trace.tape.entries),
        "ops_us": median(times["ops"]),
        "bar_us": bar_us(ops),
        **{f"{name}_us": value for name, value in parts.items()},
        "rest_us": parts["call"] - parts["executor"] - parts["signature"] - parts["guards"],
        "best": {f"{name}_us": min(values) for name, values in counted.items() if name != "ops"},
    }


def _job(target: str) -> Job:
    name = target.removesuffix("-tiny")
    is_tiny = target.endswith("-tiny")
    if name == "gpt2":
        return gpt2(8 if is_tiny else 64)
    return zoo.load(name, **TINY[name]) if is_tiny else zoo.load(name)


def gpt2(width: int) -> Job:
    """A GPT-2 of four layers with random weights, trained by AdamW; needs transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4,
        n_head=4,
        n_embd=width,
        n_positions=16,
        vocab_size=2 * width,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = [torch.randint(3, 2 * width, (2, 16)) for _ in range(3)]

    def step(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, [{"input_ids": each, "labels": each.clone()} for each in words])
