"""The verb of the command line that loads weights into a model while its first step runs."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING

from hocket.cli.console import print_json, print_tables, table
from hocket.cli.files import output_file, written
from hocket.cli.steps import wait_policy, working
from hocket.errors import InputError
from hocket.reporting.words import count_text, duration_text, quantity_text

if TYPE_CHECKING:
    import torch

    from hocket.job import Job

__all__ = ["load_verb"]


def load_verb(args: Namespace) -> None:
    """Stream FILE into MODEL while its first step runs; with ``--reorder``, write FILE in the order of first use."""
    wait_policy()
    path = output_file(args.reorder)
    with working(args, "load the step") as (target, job, bar):
        from hocket.loading import finish, load, open_weights, recorded_first_use, reorder

        model = _only_model(job)
        with closing(open_weights(args.file)) as weights:
            tensors, size_bytes = len(weights.tensors), weights.size_bytes
        batch = job.batch(0)
        bar.update("load, and run the first step")
        start = perf_counter()
        load(model, args.file, order=args.order)
        with target.blamed("the step"):
            job.step(batch)
        first_s = perf_counter() - start
        finish(model)
        bar.update("run the step again")
        start = perf_counter()
        with target.blamed("the step"):
            job.step(batch)
        next_s = perf_counter() - start
        if path is not None:
            bar.update("write the tensors in the order of their use")
            with target.blamed("the step"), recorded_first_use(model) as order:
                job.step(batch)
            reorder(args.file, path, order)
    if args.format == "json":
        print_json(
            {
                "target": job.name,
                "file": str(args.file),
                "tensors": tensors,
                "bytes": size_bytes,
                "first_step_s": first_s,
                "next_step_s": next_s,
                **({} if path is None else {"reordered": str(path)}),
            }
        )
        return
    title = f"{job.name}: {count_text(tensors, 'tensor')}, {quantity_text(size_bytes, 'B')}"
    rows = [
        ("loading and the first step", duration_text(first_s * 1e6)),
        ("the next step", duration_text(next_s * 1e6)),
    ]
    print_tables(table(title, ("", "took"), rows), *written(path))


def _only_model(job: Job) -> torch.nn.Module:
    if len(job.models) != 1:
        raise InputError(f"{job.name}: it has {count_text(len(job.models), 'model')}, and load takes one")
    return job.models[0]
