"""Checkpoints of which each rank writes what it has; read by other numbers of ranks, and by one process."""

import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distributed.ranks import Ranks, returned
from distributed.stages.trained import Work, check_same, divided_by, flat, mixed, same, stages_of
from distributed.training import tensors_of
from hocket.distributed.job import captured_for
from hocket.distributed.stages.checkpoint import part_state
from hocket.distributed.stages.crossings import Borders
from hocket.errors import ExecutionError, InputError
from hocket.tracing.state import inventory
from support.refusals import fails, refused

RATE = 0.013


def trained(rank, say, seed, steps, path, source):
    """Train from `source`, if there is one, save half way, go on; come back to what was saved, and go on again."""
    work = mixed()
    torch.manual_seed(21)
    if source is not None and rank == 0:  # what rank 0 has counts
        loaded(work, source)
    found = []
    with stages_of(work, partition=divided_by(work, rank, seed)) as fast:
        fails(ExecutionError, "before the first step", fast.state_dict)
        found += [flat(fast(work.batches[number])) for number in range(steps)]
        fails(ExecutionError, "needs a process group", fast.state_dict)
        distributed.init_process_group("gloo")
        if rank == 0:
            work.optimizer.param_groups[0]["lr"] = RATE
        dcp.save({"train": fast}, checkpoint_id=path)
        random_state = torch.get_rng_state()
        after = [flat(fast(work.batches[number])) for number in range(2)]
        dcp.load({"train": fast}, checkpoint_id=path)
        torch.set_rng_state(random_state)
        again = [flat(fast(work.batches[number])) for number in range(2)]
        distributed.destroy_process_group()
    return found, after, again, work.optimizer.param_groups[0]["lr"]


def loaded(work, path) -> None:
    """Model and optimizer from a checkpoint, as torch reads one in one process."""
    model, optimizer = get_state_dict(work.model, work.optimizer)
    state = {"train": {"model": model, "optimizer": optimizer}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of what this test is about
        dcp.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        work.model,
        work.optimizer,
        model_state_dict=state["train"]["model"],
        optim_state_dict=state["train"]["optimizer"],
    )


def equal(one, other) -> bool:
    return all(same(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_each_rank_saves_its_part_and_one_process_reads_the_whole(tmp_path):
    ends = returned(trained, 2, 1, 2, tmp_path / "saved", None, timeout_s=120)
    torch.set_num_threads(1)
    alone, read = mixed(), mixed()
    torch.manual_seed(21)
    before = [flat(alone.step(alone.batches[number])) for number in range(2)]
    with torch.no_grad():
        for parameter in read.model.parameters():
            parameter.add_(1.0)
    loaded(read, tmp_path / "saved")
    expected = tensors_of(alone)
    check_same(tensors_of(read), expected)
    assert read.optimizer.param_groups[0]["lr"] == RATE
    alone.optimizer.param_groups[0]["lr"] = RATE
    after = [flat(alone.step(alone.batches[number])) for number in range(2)]
    for losses, went_on, came_back, rate in ends:
        assert equal(losses, before)
        assert equal(went_on, after)
        assert equal(came_back, after)
        assert rate == RATE
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    assert len({info.relative_path for info in saved.storage_data.values()}) == 2
    tensors = [n for n, kind in saved.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)]
    stored = [at.fqn for at in saved.storage_data if at.fqn in tensors]
    assert sorted(stored) == sorted(tensors)  # each once
    assert len(tensors) == len(expected)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_from_it(tmp_path):
    (_, after, _, _), _ = returned(trained, 2, 1, 2, tmp_path / "first", None, timeout_s=120)
    torch.set_num_threads(1)
    alone = mixed()
    loaded(alone, tmp_path / "first")
    torch.manual_seed(21)
    wanted = [flat(alone.step(alone.batches[number])) for number in range(2)]
    assert not equal(wanted, after)  # other random numbers
    with Ranks(trained, 3, 5, 2, tmp_path / "second", tmp_path / "first") as ranks:
        for losses, _, _, _ in ranks.returned(120):
            assert equal(losses, wanted)
    once_more = mixed()
    loaded(once_more, tmp_path / "second")
    check_same(tensors_of(once_more), tensors_of(alone))


def broken(rank, say):
    """Loads what is not of the model, at rank 1; what is of another checkpoint; and what is right."""
    work = mixed()
    found = []

    def loading(given):
        try:
            fast.load_state_dict(given)
        except InputError as error:
            found.append(str(error))

    distributed.init_process_group("gloo")
    with stages_of(work, partition=divided_by(work, rank, 1)) as fast:
        fast(work.batches[0])
        state = fast.state_dict()
        before = tensors_of(work)
        name = next(iter(state["model"]))
        lacks = {**state, "model": {key: value for key, value in state["model"].items() if key != name}}
        other = {**state, "model": {**state["model"], name: torch.zeros(7, 7, dtype=torch.float64)}}
        moved = {key: value + 1 for key, value in state["model"].items()}
        for wrong in (lacks, other, {**state, "optimizer": {**state["optimizer"], "param_groups": []}}, None):
            loading(wrong if rank == 1 else {**state, "model": moved})
        groups = [{**group, "lr": group["lr"] * (1 + rank)} for group in state["optimizer"]["param_groups"]]
        loading({**state, "optimizer": {**state["optimizer"], "param_groups": groups}})
        bias = torch.full((2,), float(rank))  # of which one of the two keeps no part
        loading({**state, "model": {**state["model"], "last.bias": bias}})
        assert all(same(value, before[key]) for key, value in tensors_of(work).items())
        halves = {key: value * 0.5 if value.is_floating_point() else value for key, value in state["model"].items()}
        loading({**state, "model": halves})
        changed = [key for key, value in tensors_of(work).items() if not same(value, before[key])]
        fast(work.batches[1])
    distributed.destroy_process_group()
    return name, found, changed, fast.steps


def test_all_ranks_load_one_checkpoint_or_none_does():
    (_, at_0, changed, steps), (name, at_1, _, _) = returned(broken, 2, timeout_s=120)
    assert len(at_0) == len(at_1) == 6
    assert at_0[:4] == ["distribute: rank 1 cannot load what it was given, so no rank does; its error says why"] * 4
    assert f"model: '{name}' is missing in what is loaded" in at_1[0]
    assert re.search(rf"'{name}' is .* here, and torch.float64 \(7, 7\) in what is loaded", at_1[1])
    assert "expected 1 groups of the optimizer, got 0" in at_1[2]
    assert "expected a mapping" in at_1[3]
    assert at_0[4] == at_1[4]
    assert "rank 0 and rank 1 load different checkpoints: 'options of the optimizer' differs" in at_0[4]
    assert "rank 0 and rank 1 load different checkpoints: 'last.bias' differs" in at_0[5]
    assert changed
    assert steps == 2


def loads_alone(rank, say, who):
    work = mixed()
    distributed.init_process_group("gloo")
    with stages_of(work, partition=divided_by(work, rank, 1)) as fast:
        fast(work.batches[0])
        state = fast.state_dict()
        if rank == who:
            fast.load_state_dict(state)
        for batch in work.batches[:3]:
            fast(batch)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_loads_alone_is_an_error_of_all(who):
    with Ranks(loads_alone, 2, who) as ranks:
        ends = [ranks.raised(rank) for rank in range(2)]
    assert "rank 1 does something else than rank 0" in ends[1]
    assert "lost rank 1" in ends[0]


def rivals():
    """Two models, an optimizer each, one step: as a GAN trains."""
    torch.manual_seed(5)
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        of_judge.zero_grad()
        made = maker(batch)
        loss = judge(made.detach()).square().mean() - judge(batch).mean()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        other = judge(made).mean() + made.square().mean()
        other.backward()
        of_maker.step()
        return loss, other

    return [maker, judge], [of_maker, of_judge], step


BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def whole_of(models, optimizers):
    return get_state_dict(nn.ModuleDict({f"model{n}": each for n, each in enumerate(models)}), optimizers)


def of_both(rank, say, path):
    models, optimizers, step = rivals()
    captured = captured_for(step, models, optimizers, BATCHES[0])
    partition = {op.name: int(op.layer.startswith("model1")) for op in captured.graph.ops}
    for ops, _ in Borders(captured).together:
        partition |= dict.fromkeys(ops, partition[ops[0]])
    distributed.init_process_group("gloo")
    with stages_of(Work(models, optimizers, step, BATCHES), partition=partition if rank == 0 else {}) as fast:
        for batch in BATCHES[:2]:
            fast(batch)
        dcp.save({"train": fast}, checkpoint_id=path)
        after = [float(each.detach()) for each in fast(BATCHES[2])]
        dcp.load({"train": fast}, checkpoint_id=path)
        again = [float(each.detach()) for each in fast(BATCHES[2])]
    distributed.destroy_process_group()
    return after, again


@pytest.mark.slow
def test_several_models_and_optimizers_are_saved_by_parts_too(tmp_path):
    ends = returned(of_both, 2, tmp_path / "saved", timeout_s=120)
    torch.set_num_threads(1)
    models, optimizers, step = rivals()
    for batch in BATCHES[:2]:
        step(batch)
    expected = whole_of(models, optimizers)
    others, of_others, _ = rivals()
    model_state, optimizer_state = whole_of(others, of_others)
    state = {"train": {"model": model_state, "optimizer": optimizer_state}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns of what this test is about
        dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert state["train"]["model"].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert torch.equal(state["train"]["model"][name], value), name
    for name, values in expected[1]["state"].items():
        for key, value in values.items():
            assert torch.equal(state["train"]["optimizer"]["state"][name][key], value), (name, key)
    wanted = [float(each.detach()) for each in step(BATCHES[2])]
    for after, again in ends:
        assert after == again == wanted


def test_two_optimizers_of_one_parameter_are_refused():
    model = nn.Linear(2, 1)
    both = [torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    model(torch.ones(1, 2)).sum().backward()
    for each in both:
        each.step()
    places = inventory(model, both)
    entries = {entry.name: entry for entry in (*places.parameters, *places.tensors)}
    refused("two optimizers keep state of 'weight'", part_state, model, both, entries, [])
