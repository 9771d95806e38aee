"""Every way of running a step that a user would choose from, side by side: ``python -m benchmarks concurrency``.

Contenders, each in a process of its own on a twin of the same job, in turns (`benchmarks.turns`), medians with spread:

- ``eager``: torch as recommended, threads = cores;
- ``compile``: `torch.compile` of the model, with what it really compiled: graphs, breaks, recompiles;
  ``compile_update``: of the model and of the optimizer's step; ``compile_last`` and ``compile_last_update``: the same
  with model and images in channels last, where there are images; ``compile_autotune``: all of these, in its mode
  ``max-autotune``;
- ``all``: `hocket.schedule`, called as a user calls it: signature and guards included. Of its audits, which take at
  most 0.25% of a long run, the first ones would be every other step here. They are put off. ``rounding`` and
  ``close``: the same with these ``numerics``, and ``close_compiled`` once its compiled forms are there.
- ``jax``: ``jit`` of the whole step, where JAX is installed: the MLP, LSTM cells and GPT-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils._pytree import tree_leaves

from benchmarks.bench import Save, check_names, columns_of, table_of, unsaved
from benchmarks.contenders import compared, compiled_step, eager_step, is_image, job_of, scheduled_step
from benchmarks.jax_steps import MODELS, jax_missing, jax_step
from benchmarks.turns import Elsewhere, title
from hocket.job import Job

SMALL = ("mlp", "transformer/4", "lstm-cells/20", "resnet20/4", "gpt2", "bert-tiny")
LARGE = (
    *("resnet20/64", "densenet40/32", "inception-v3/4", "resnet50/8"),
    *("vgg16/2", "vgg11/8", "mobilenet-v2/8", "dcgan/64"),
)
# True if the update is compiled, true if images have their channels last, and the mode.
COMPILED: dict[str, tuple[bool, bool, str | None]] = {
    "compile": (False, False, None),
    "compile_update": (True, False, None),
    "compile_last": (False, True, None),
    "compile_last_update": (True, True, None),
    "compile_autotune": (True, True, "max-autotune"),
}
CONTENDERS = (*COMPILED, "all", "rounding", "close", "close_compiled", "jax")
ROUNDS = 12
BLOCKS = {"small": 8, "large": 2}  # counted steps in each


def run(
    targets: tuple[str, ...] = (),
    *,
    quick: bool = False,
    compiled: bool = True,
    bitwise: bool = True,
    rounds: int = ROUNDS,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure the steps of small ops, and unless `quick` those of large ones, and return rows of `measure` by group."""
    result: dict[str, Any] = {"small": {}, "large": {}}
    for label in _labels(targets, quick):
        group = "small" if label in SMALL else "large"
        result[group][label] = measure(label, compiled, bitwise, rounds, BLOCKS[group])
        save(result)
    return result


def _labels(targets: tuple[str, ...], quick: bool) -> list[str]:
    """The targets as NAME/BATCH: a name alone stands for all sizes of it."""
    known = SMALL if quick else (*SMALL, *LARGE)
    names = [label.partition("/")[0] for label in known]
    check_names("concurrency", [name for name in targets if "/" not in name], sorted(set(names)))
    sizes = {name: [label for label in known if label.partition("/")[0] == name] for name in names}
    return [label for name in targets or sizes for label in sizes.get(name, [name])]


def measure(target: str, compiled: bool, bitwise: bool, rounds: int, block: int) -> dict[str, Any]:
    """One target: times in milliseconds, ratios to eager, verdicts, and what `torch.compile` did."""
    job = job_of(target)
    ways: dict[str, tuple[Any, ...]] = {"eager": (eager_step,)}
    if compiled:
        has_images = any(map(is_image, tree_leaves(job.batch(0))))
        ways |= {
            label: (_compiled_step, target, update, last and has_images, mode)
            for label, (update, last, mode) in COMPILED.items()
            if has_images or mode or not last
        }
    if bitwise:
        ways |= {"all": (scheduled_step, "bitwise"), "rounding": (scheduled_step, "rounding")}
    if bitwise or not compiled:
        ways["close"] = (scheduled_step, "close")
    if compiled:
        ways["close_compiled"] = (scheduled_step, "close", True)
    name = target.partition("/")[0]
    others: dict[str, Callable[[], Elsewhere]] = {}
    if name in MODELS and not jax_missing():
        others["jax"] = partial(jax_step, name, job)
    return compared(ways, job_of, target, rounds, block, others)


def _compiled_step(job: Job, target: str, update: bool, last: bool, mode: str | None) -> tuple[Any, dict[str, Any]]:
    step, report = compiled_step(job, update, last, mode)
    if step is None and mode and last:  # a model that cannot have its channels last is tuned without
        step, report = compiled_step(job_of(target), update, False, mode)
    return step, report


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {"target": "{name}", **columns_of("speedup", CONTENDERS)}
    yield table_of(title(result), columns, result["small"] | result["large"])
