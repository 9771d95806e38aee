"""Twin jobs of a small model, and calls of a schedule until it has decided."""

import torch

import hocket
from hocket import zoo

# More calls than any variant takes until its verdict.
MANY = 200


def twin(**size: int) -> tuple[hocket.Job, hocket.Job]:
    made = [zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam", **size) for _ in range(2)]
    return made[0], made[1]


def state(job: hocket.Job) -> list[tuple[str, torch.Tensor]]:
    (model,), (optimizer,) = job.models, job.optimizers
    found = list(model.state_dict().items())
    for number, values in enumerate(optimizer.state.values()):
        found += [(f"{number}.{key}", value) for key, value in values.items()]
    return found


def decide(fast: hocket.Schedule, job: hocket.Job) -> int:
    """Call until there is a verdict; how many calls that took."""
    for number in range(MANY):
        fast(job.batch(number))
        if fast.decided:
            return number + 1
    raise AssertionError(f"no verdict after {MANY} steps")


def call(fast: hocket.Schedule, job: hocket.Job, times: int) -> None:
    """Make this number of calls, with the batches from the first one on."""
    for number in range(times):
        fast(job.batch(number))


def pass_audits(fast: hocket.Schedule, job: hocket.Job) -> None:
    """Call until the next step is neither audited nor part of a look (see `hocket.autotune.upkeep`)."""
    for _ in range(MANY):
        if not fast.decided or fast._pool.current.calls_until_upkeep(1):
            return
        fast(job.batch(0))
    raise AssertionError(f"each of {MANY} steps was audited")
