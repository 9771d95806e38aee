"""Jobs in which no rank has the model's values: each reads what its part uses from one file."""

import resource
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distributed.ranks import Ranks, returned
from distributed.stages.trained import (
    Work,
    check_as_alone,
    first_blocks,
    flat,
    on_meta,
    squared,
    stages_of,
    wide,
    work_of,
)
from distributed.training import tensors_of
from hocket.distributed.job import captured_for
from hocket.distributed.stages.from_file import ModelFile, check_fresh, check_optimizers_begin_from_zeros
from hocket.distributed.stages.memory import captured_at
from hocket.errors import FormatError, InputError
from support.refusals import fails, refused


def written(path, work: Work, moved: float = 0.02):
    """A file of other values than those that the model begins with."""
    state = work.model.state_dict()
    save_file({k: v + moved if v.is_floating_point() else v.clone() for k, v in state.items()}, path)
    return path


def alone_from(path, name: str, optimizer: str, count: int):
    """Result of `trained.alone` in one process that loads the file."""
    torch.set_num_threads(1)
    work = work_of(name, optimizer)
    with torch.no_grad():
        from safetensors.torch import load_file

        work.model.load_state_dict(load_file(path))
    torch.manual_seed(21)
    found = [flat(work.step(work.batches[number % len(work.batches)])) for number in range(count)]
    return found, tensors_of(work), torch.get_rng_state().numpy().copy()


def train(rank, say, name, optimizer, steps, path, settings):
    read = []
    usual = ModelFile.read
    ModelFile.read = lambda file, entries: read.append(usual(file, entries))
    work = on_meta(name, optimizer)
    if rank == 0:  # it has what no file has
        for module, real in zip(work.model.modules(), work_of(name, optimizer).model.modules(), strict=True):
            for buffer in module._non_persistent_buffers_set:
                module._buffers[buffer] = real._buffers[buffer]
    torch.manual_seed(21)
    with stages_of(work, weights=path, **settings) as fast:
        found = [flat(fast(work.batches[number % len(work.batches)])) for number in range(steps)]
        held = sum(p.numel() for p in work.model.parameters())
        fast.gather()
    return found, tensors_of(work) if rank == 0 else None, torch.get_rng_state().numpy().copy(), read, held


@pytest.mark.parametrize(
    ("name", "optimizer", "ranks", "settings"),
    [
        ("mlp", "sgd", 3, {"epsilon": 0.3}),
        pytest.param("mixed", "adam", 2, {"objective": "cut", "epsilon": 0.5}, marks=pytest.mark.slow),
        pytest.param("transformer", "adam", 2, {}, marks=pytest.mark.slow),
        pytest.param("resnet20", "sgd", 2, {"epsilon": 0.2}, marks=pytest.mark.slow),
        pytest.param("lstm-cells", "adam", 3, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_read_their_parts_train_as_one_process_that_loads_the_file(
    tmp_path, name, optimizer, ranks, settings
):
    path = written(tmp_path / "model.safetensors", work_of(name, optimizer))
    size_bytes = path.stat().st_size
    ends = returned(train, ranks, name, optimizer, 5, path, settings, timeout_s=200)
    check_as_alone(ends, alone_from(path, name, optimizer, 5))
    whole = sum(parameter.numel() for parameter in work_of(name, optimizer).model.parameters())
    assert sum(held for *_, held in ends) < ranks * whole
    read = [sum(of_rank) for *_, of_rank, _ in ends]
    assert min(read) > 0
    assert sum(read) < ranks * size_bytes - whole  # not even all but a little, by each


def test_values_are_read_as_the_dtype_and_the_layout_of_the_model_have_it(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    values = {name: torch.randn(value.shape).double() for name, value in model.state_dict().items()}
    save_file(values, tmp_path / "w.safetensors")
    model[1].weight.data = torch.empty(2, 5).t()
    captured = captured_for(*small_step(model))
    file = ModelFile(model, tmp_path / "w.safetensors")
    entries = [e for e in captured.trace.places.parameters if e.name != "0.bias"]
    before = model[0].bias.detach().clone()
    assert file.read(entries) == 8 * sum(value.numel() for name, value in values.items() if name != "0.bias")
    for entry in entries:
        assert torch.equal(entry.get(), values[entry.name].float())
    assert torch.equal(model[0].bias, before)
    file.close()


def small_step(model, optimizer=None):
    work = squared(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(4, 3)])
    return work.step, work.model, work.optimizer, work.batches[0]


def test_files_that_are_not_of_this_model_are_refused_by_name(tmp_path):
    model = nn.Linear(3, 2)
    path = tmp_path / "w.safetensors"
    for values, words in (
        ({"weight": torch.ones(2, 3)}, 'Missing key(s) in state_dict: "bias"'),
        ({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, "size mismatch for weight"),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(2)},
            'Unexpected key(s) in state_dict: "more"',
        ),
    ):
        save_file(values, path)
        with pytest.raises(InputError) as caught:
            ModelFile(model, path)
        assert words in str(caught.value)
    refused("are of one model, and the step has 2", ModelFile, [model, nn.Linear(1, 1)], path)
    path.write_bytes(b"none")
    fails(FormatError, "expected a safetensors file", ModelFile, model, path)
    with pytest.raises(FileNotFoundError):
        ModelFile(model, tmp_path / "nothing.safetensors")


def test_one_file_is_told_from_another_by_its_values(tmp_path):
    model = nn.Linear(3, 2)
    values = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    save_file(values, tmp_path / "a")
    save_file(values, tmp_path / "b", metadata={"made": "elsewhere"})
    save_file(values | {"bias": torch.zeros(2)}, tmp_path / "c")
    found = [ModelFile(model, tmp_path / name) for name in "abc"]
    assert found[0].digest == found[1].digest != found[2].digest
    for each in found:
        each.close()


def test_optimizers_that_begin_with_a_state_or_not_from_zeros_are_refused():
    model = nn.Linear(3, 2)
    step, _, adam, batch = small_step(model, torch.optim.Adam(model.parameters()))
    check_fresh(model, adam)
    captured = captured_for(step, model, adam, batch)
    state = torch.get_rng_state()
    check_optimizers_begin_from_zeros(captured)
    assert torch.equal(torch.get_rng_state(), state)
    step(batch)
    refused(r"'optimizer\..*exp_avg' is there already|is there already", check_fresh, model, adam)
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(InputError, match="the optimizer's first step is not like those that follow"):
        check_optimizers_begin_from_zeros(captured_for(*small_step(model, damped)))

    class Odd(torch.optim.SGD):
        def __init__(self, params, number):
            super().__init__(params, lr=0.1)

    with pytest.raises(InputError, match="whether Odd begins from zeros cannot be tried"):
        check_optimizers_begin_from_zeros(captured_for(*small_step(model, Odd(model.parameters(), 1))))


def test_what_is_in_no_file_has_to_be_at_rank_0():
    work = on_meta("mixed")
    names = dict(work.model.named_parameters())
    with pytest.raises(InputError, match=r"'norm\.running_mean' of rank 0 is on the meta device.*not in that file"):
        captured_at(0, work.step, work.model, work.optimizer, work.batches[0], names)


def differs(rank, say, paths, also):
    work = on_meta("mixed")
    with stages_of(work, weights=paths[rank], timeout_s=20.0, executor="auto", **also) as fast:
        fast(work.batches[0])


def test_ranks_that_read_other_files_are_refused(tmp_path):
    paths = [written(tmp_path / f"{moved}", work_of("mixed", "adam"), moved) for moved in (0.1, 0.2)]
    for given, words in ((paths, "a file"), ([paths[0], None], "of rank 0 here, and a file")):
        with Ranks(differs, 2, given, {}) as ranks:
            for rank in range(2):
                assert f"rank 1 trains something else: job 'weights' is {words}" in ranks.raised(rank, 40)
    with Ranks(differs, 1, paths[:1], {"rebalance": 2}) as ranks:
        assert "cannot be combined with weights=" in ranks.raised(0, 40)


WIDTH, DEPTH = 2048, 8


def peak_of_a_job(rank, say, path):
    """MiB of the process's peak beyond what it took without a model; without a file rank 0 has the model's values."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work = wide(WIDTH, DEPTH, rows=4, device="meta" if rank or path else "cpu")
    captured = captured_at(1 if path else rank, work.step, work.model, work.optimizer, work.batches[0])
    partition = first_blocks(captured, DEPTH // 2)
    del captured
    with stages_of(work, partition=partition, weights=path, executor="auto", timeout_s=120.0) as fast:
        losses = [float(fast(work.batches[0])) for _ in range(3)]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, losses


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("has_file", [False, True], ids=["values of rank 0", "a file"])
def test_no_rank_without_values_ever_has_the_memory_of_the_whole_model(tmp_path, has_file):
    path = written(tmp_path / "wide.safetensors", wide(WIDTH, DEPTH, rows=4), 0.0) if has_file else None
    (of_rank_0, losses), (of_rank_1, others) = returned(peak_of_a_job, 2, path, timeout_s=250)
    parameters = 4 * DEPTH * WIDTH * (WIDTH + 1) / 2**20
    print(f"parameters {parameters:.0f} MiB, peak of rank 0 {of_rank_0:.0f}, of rank 1 {of_rank_1:.0f}")
    assert losses == others
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]
    # Half of parameters and two moments, its gradients, and what it takes to capture; the whole would be four times.
    assert of_rank_1 < 3.2 * parameters
    assert of_rank_0 < 3.2 * parameters if has_file else of_rank_1 < 0.6 * of_rank_0
