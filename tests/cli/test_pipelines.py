"""`hocket run --ranks`: real ranks; and targets that cannot be pipelines, each in one line."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from distributed.ranks import Ranks
from hocket.cli import main, pipelines
from hocket.distributed.pipelines.step import micro_batches_of
from hocket.errors import InputError
from tiny_sizes import TINY_SIZES

from .conftest import TINY

TARGETS = """
import torch
import hocket
from support.steps import update


def job_of(model, step_of, rows=8, models=None):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hocket.Job(step_of(model, optimizer), models or model, optimizer, [torch.randn(rows, 4)])


def plain(model, optimizer):
    def step(batch):
        return update(optimizer, model(batch).square().mean())
    return step


def net(*more):
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), *more, torch.nn.Linear(4, 4))


def fine():
    return job_of(net(), plain)


def uneven():
    return job_of(net(), plain, rows=6)


def random():
    return job_of(net(torch.nn.Dropout(0.5)), plain)


def several():
    model = net()
    return job_of(model, plain, models=[model, net()])


def twice():
    return job_of(net(), lambda model, _: lambda batch: (model(batch) + model(batch)).square().mean().backward())


def parts():
    return job_of(net(), lambda model, _: lambda batch: model[0](batch).square().mean().backward())


def silent():
    return job_of(net(), lambda model, _: lambda batch: model(batch).square().mean())


def named():
    return job_of(net(), lambda model, _: lambda batch: model(input=batch).square().mean().backward())


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, value):
        return self.linear(value) if value.sum() > 0 else -self.linear(value)


def branching():
    return job_of(Branching(), plain)


def tiny():
    return job_of(torch.nn.Linear(4, 4), plain)


def penalty():
    def step_of(model, _):
        return lambda batch: (model(batch).square().mean() + model[0].weight.square().sum()).backward()
    return job_of(net(), step_of)


def cast():
    def step_of(model, _):
        def step(batch):
            with torch.autocast("cpu", torch.bfloat16):
                model(batch).square().mean().backward()
        return step
    return job_of(net(), step_of)


def not_a_number():
    return job_of(net(), lambda model, _: lambda batch: (model(batch).mean() * float("nan")).backward())


def counted():
    calls = []
    def step_of(model, _):
        return lambda batch: (model(batch).mean() * (calls.append(0) or len(calls))).backward()
    return job_of(net(), step_of)


def summed():
    def step_of(model, _):
        return lambda batch: [model(half).square().mean().backward() for half in batch.split(1)]
    return job_of(net(), step_of)
"""


def ran(*words):
    command = [sys.executable, "-m", "hocket", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def printed_by(rank, say, words):
    """Output of a rank that is started with these words of a command line."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


@pytest.fixture
def printed(monkeypatch):
    """Output of each rank; ranks are forked. Torchrun starts them in the slow test, and for `hocket ps`."""
    found = []

    def start_ranks(args, count):
        with Ranks(printed_by, count, args.words) as ranks:
            found.extend(ranks.returned(120))

    monkeypatch.setattr(pipelines, "start_ranks", start_ranks)
    return found


ENTRIES = [
    name if name in ("mlp", "transformer") else pytest.param(name, marks=pytest.mark.slow) for name in TINY_SIZES
]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_partition_runs_on_ranks_with_eagers_bits(hocket, printed, tmp_path, name):
    sizes = [word for key, value in TINY_SIZES[name].items() for word in ("--set", f"{key}={value}")]
    target = (name, "--batch-size", 2, *sizes)
    words = ("--devices", 2, "--objective", "load", "--budget-s", 1, "-o", tmp_path / "parts.txt")
    assert hocket("partition", *target, *words).status == 0
    words = ("--ranks", 2, "--partition", tmp_path / "parts.txt", "--runs", 3, "--format", "json")
    assert hocket("run", *target, *words).status == 0
    assert printed[1:] == [""]
    found = json.loads(printed[0])
    assert found["is_bitwise"]
    assert min(found["ops"]) > 0
    assert len(found["steps_us"]) == 3


def test_a_partition_of_another_number_of_parts_is_refused(hocket, made):
    found = hocket("run", *TINY, "--ranks", 4, "--partition", made["plan"])
    found.refused(2, "parts, and --ranks is 4")


def test_a_step_runs_in_stages_with_eagers_gradients(hocket, printed):
    words = (*TINY, "--set", "depth=4", "--ranks", 2, "--microbatches", 4, "--runs", 2, "--format", "json")
    assert hocket("run", *words).status == 0
    assert printed[1:] == [""]
    found = json.loads(printed[0])
    assert (found["ranks"], found["microbatches"], found["schedule"]) == (2, 4, "1f1b")
    assert found["gradient_error"] <= 1e-6
    assert [stage["rank"] for stage in found["stages"]] == [0, 1]
    assert [stage["in_flight"] for stage in found["stages"]] == [2, 1]
    assert all(stage["forward_us"] > 0 and stage["kept_bytes"] > 0 for stage in found["stages"])
    assert len(found["steps_us"]) == 2
    assert min(found["predicted_us"], found["measured_us"], found["eager_us"], *found["memory_bytes"]) > 0


@pytest.mark.slow
def test_several_stages_a_rank_and_the_table():
    words = ("--ranks", 2, "--microbatches", 4, "--runs", 2)
    outcome = ran("mlp", "--set", "depth=6", *words, "--schedule", "interleavedzerobubble")
    assert outcome.returncode == 0, outcome.stderr
    assert "4 stages on 2 ranks, interleavedzerobubble, 4 micro-batches" in outcome.stdout
    assert "step, predicted" in outcome.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uneven", "a batch of 6 rows cannot be divided into 4 equal micro-batches"),
        ("random", "op 'dropout' draws random numbers"),
        ("several", "the job has 2 models, and a pipeline has one"),
        ("twice", "the step calls the model 2 times"),
        ("parts", "the step does not call the model itself"),
        ("silent", "the step does not call backward() on its loss"),
        ("named", "expected the model to be called with tensors by place, got (input=)"),
        ("branching", "torch cannot trace the model"),
        ("tiny", "2 stages, and there are 0 places to cut 1 ops at"),
        ("penalty", "reaches the parameter '0.weight' by another way than what the model returns"),
        ("cast", "calls the model under torch.autocast at targets.py:"),
        ("not_a_number", "is nan, in one process, too"),
        ("counted", "depends on more than the batch and what the model returns"),
        ("summed", "calls backward() 2 times, last at targets.py:"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused_in_one_line(hocket, tmp_path, name, message):
    (tmp_path / "targets.py").write_text(TARGETS)
    found = hocket("run", f"targets.py:{name}", "--ranks", 2, "--microbatches", 4)
    found.refused(1, message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", 2, "--microbatches", 1), "1 for 2 ranks: fewer than one for each"),
        (("--ranks", 2, "--planner", "list"), "--planner: not with --ranks"),
        (("--memory-bytes", 1000), "--memory-bytes are of a pipeline: add --ranks"),
        (("--microbatches", 2), "add --ranks"),
        (("--schedule", "gpipe"), "add --ranks"),
        (("--partition", "plan.txt"), "add --ranks"),
        (("--partition", "plan.txt", "--ranks", 2, "--schedule", "gpipe"), "--partition: not with --microbatches"),
        (("--partition", "plan.txt", "--ranks", 2, "--plan", "plan.txt"), "--plan: not with --ranks"),
    ],
)
def test_words_that_do_not_go_together(hocket, made, words, message):
    found = hocket("run", *TINY, *words)
    found.refused(2, message)


def test_schedules_that_cannot_run_here(hocket):
    assert "gloo sends nothing to itself" in hocket("run", *TINY, "--ranks", 2, "--schedule", "zbvzerobubble").error
    assert "unknown schedule 'zigzag'; one of 1f1b" in hocket("run", *TINY, "--ranks", 2, "--schedule", "zigzag").error


def test_stages_that_fit_into_no_process_are_refused(hocket):
    words = ("run", *TINY, "--ranks", 2, "--memory-bytes", 64)
    assert "fit into 64 bytes each" in hocket(*words).error


def test_batches_are_divided_by_their_rows():
    with pytest.raises(InputError, match="one first dimension, got none"):
        micro_batches_of(("no", "tensor"), 2)
