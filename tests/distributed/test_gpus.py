"""Ranks whose tensors are on GPUs, on a stand-in that does nothing before it is waited for (`support.lagging_cuda`)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from distributed import agents, training
from distributed.agents import rank_that_publishes, versions_seen
from distributed.ranks import Ranks, returned
from distributed.stages import trained
from distributed.stages.trained import alone, check_as_alone, mixed, rank_of_stages
from distributed.training import rank_of_job
from hocket.distributed import packets, staging
from hocket.distributed.description import _given as described
from hocket.distributed.job import captured_for
from hocket.distributed.packets import pack
from hocket.distributed.stages.from_file import ModelFile
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError
from hocket.execution import executor
from hocket.execution.native import lanes as native_lanes
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing.state import inventory
from support.lagging_cuda import Lagging, LaggingCuda, StrictError
from support.refusals import fails, refused

VALUES = {
    "bias": torch.arange(5.0),
    "weight": torch.randn(30_000, generator=torch.Generator().manual_seed(1)).double(),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
}
ORDER = ["weight", "bias", "turned", "flags", "empty"]


def both_ends() -> list[Wire]:
    """Both ends of a wire in this process, of which the first one sends `VALUES` in order."""
    store, timeout = HashStore(), timedelta(seconds=20)
    ends: list[Any] = [None, None]

    def connect(place: int) -> None:
        groups = [ProcessGroupGloo(PrefixStore(of, store), place, 2, timeout) for of in ("bytes", "records")]
        ends[place] = Wire(*groups, place, f"rank {place}", f"rank {1 - place}", 20.0)

    threads = [threading.Thread(target=connect, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = pack((name, VALUES[name].nbytes) for name in ORDER)
    ends[0].add(ordered, (), ordered=True)
    ends[1].add((), ordered, ordered=True)
    return ends


def carried(gpus: Lagging, monkeypatch: pytest.MonkeyPatch, steps: int = 2) -> tuple[list[dict], list[dict], list]:
    """Values that one GPU computes in each step, what another one computes of them, and the order of their arrival."""
    sender, receiver = gpus.devices
    gpus.put_in_place(sender, monkeypatch.setattr)
    ends = both_ends()
    memory = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    made = {name: value.clone() for name, value in VALUES.items()}
    sender.own(made)
    receiver.own(memory)
    expected, found, orders = [], [], []
    over = threading.Semaphore(0)
    with gpus.noted(), closing(*ends):
        for step in range(1, steps + 1):
            for value in made.values():
                value.logical_not_() if value.dtype is torch.bool else value.mul_(-1.5)
            for name in sorted(ORDER):
                ends[1].receive(name, memory[name], step, lambda error: over.release())
                ends[0].send(name, made[name], step, lambda error: over.release())
            for _ in range(2 * len(ORDER)):
                assert over.acquire(timeout=20)
            found.append({name: value.clone() for name, value in memory.items()})
            orders.append(ends[1].arrived[step])
            for value in memory.values():
                value.zero_()  # what is read later of a step would show
        for step in range(1, steps + 1):
            factor = (-1.5) ** step
            expected.append(
                {n: v ^ (step % 2 == 1) if v.dtype is torch.bool else v * factor for n, v in VALUES.items()}
            )
        return expected, [{name: value.cpu() for name, value in values.items()} for values in found], orders


@contextmanager
def closing(*ends: Wire) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


def alike(one: list[dict], other: list[dict]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in VALUES)


def test_values_go_from_gpu_to_gpu_in_the_order_of_the_plan(monkeypatch):
    expected, found, orders = carried(Lagging(), monkeypatch)
    assert alike(expected, found)
    assert orders == [ORDER] * 2


def no_wait(device: LaggingCuda, event: Any) -> None:
    """Values that the host has not waited for."""


def another_stream(device: LaggingCuda) -> Any:
    """A stream that has no order with the others."""
    return device.stream(0)


def written_on_another_stream(place: torch.Tensor, tensor: torch.Tensor) -> None:
    device = staging.device_of(tensor)
    assert isinstance(device, LaggingCuda)
    values = place.view(tensor.dtype).view(tensor.shape)
    device.launch(device.stream(0), lambda: tensor.detach().copy_(values, non_blocking=True))


def pageable(device: LaggingCuda, size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(("method", "broken"), [("wait_on_host", no_wait), ("default", another_stream)])
def test_a_missing_wait_shows(monkeypatch, method, broken):
    gpus = Lagging()
    for device in gpus.devices:
        device.current()
    monkeypatch.setattr(LaggingCuda, method, broken)
    expected, found, _ = carried(gpus, monkeypatch)
    assert not alike(expected, found)


def test_memory_that_is_not_pinned_is_refused(monkeypatch):
    monkeypatch.setattr(LaggingCuda, "pinned", pageable)
    with pytest.raises(StrictError, match="not pinned"):
        carried(Lagging(), monkeypatch)


def test_a_caller_on_another_stream_is_refused(monkeypatch):
    gpus, model = Lagging(), nn.Linear(2, 2)
    gpu = gpus.devices[1]
    gpu.own(model.state_dict(keep_vars=True))
    monkeypatch.setattr(staging, "device_of", gpus.owner)
    devices = staging.devices_of(model)
    assert devices == [gpu]
    staging.check_default_streams(devices)
    refused("another one is current here", gpu.launch, gpu.stream(0), lambda: staging.check_default_streams(devices))


def rank_on_gpu(rank: int, say: Any, function: Any, *arguments: Any, broken: str = "") -> Any:
    """Run the function of a rank, each rank on another GPU: models and batches that the rank makes are on it."""
    gpus = Lagging()
    gpu = gpus.devices[rank % 2]
    gpus.put_in_place(gpu)
    for module, name in ((training, "training"), (training, "batches"), (trained, "work_of")):
        setattr(module, name, partial(_on, gpu, getattr(module, name)))
    for module, name in ((agents, "Counting"), (agents, "ones")):
        setattr(module, name, partial(_on, gpu, getattr(module, name)))
    if broken == "no wait":
        LaggingCuda.wait_on_host = no_wait  # type: ignore[method-assign]
    elif broken == "another stream":
        packets.from_host = written_on_another_stream
    with gpus.noted():
        return function(rank, say, *arguments)


def rank_on_gpu_without(rank: int, say: Any, broken: str, function: Any, *arguments: Any) -> Any:
    return rank_on_gpu(rank, say, function, *arguments, broken=broken)


def _on(gpu: LaggingCuda, make: Any, *given: Any, **options: Any) -> Any:
    made = make(*given, **options)
    model = getattr(made, "model", made)
    tensors = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else made
    gpu.own(tensors, getattr(made, "batches", ()))
    return made


JOB = (1, 4, "sgd", False, "layer")  # servers, steps, optimizer, clipped, order


@pytest.fixture(scope="module")
def on_cpus() -> Any:
    with Ranks(rank_of_job, 3, *JOB) as ranks:
        return ranks.returned()


def test_a_job_on_gpus_trains_as_one_on_cpus(on_cpus):
    found = returned(rank_on_gpu, 3, rank_of_job, *JOB)
    assert found[2] == on_cpus[2] == 4
    for mine, its in zip(found[:2], on_cpus[:2], strict=True):
        assert mine[:2] == its[:2]  # losses, and the orders in which parameters arrived
    assert all(np.array_equal(found[0][3][name], value) for name, value in on_cpus[0][3].items())


@pytest.mark.parametrize("broken", ["no wait", pytest.param("another stream", marks=pytest.mark.slow)])
def test_a_job_without_a_wait_does_not_train_as_one_on_cpus(on_cpus, broken):
    with Ranks(rank_on_gpu_without, 3, broken, rank_of_job, *JOB) as ranks:
        kind, found = ranks.end(0)
    assert kind == "raised" or found[0] != on_cpus[0][0]


def test_stages_on_gpus_train_as_one_process_on_a_cpu():
    expected = alone("mixed", "adam", 4)
    found = returned(rank_on_gpu, 2, rank_of_stages, "mixed", "adam", 4, 1)
    check_as_alone(found, expected)
    assert all(ops for _, _, _, ops, _ in found)


def test_agents_on_gpus_have_one_version_in_each_call():
    options = {"order": "layer", "executor": "python"}
    with Ranks(rank_on_gpu, 2, rank_that_publishes, 1, 1, [("begin", 1), ("go on", None), ("end", 0)]) as ranks:
        ranks.store.set("begin", "")
        address = f"127.0.0.1:{ranks.store.port}"
        with Ranks(rank_on_gpu, 1, versions_seen, address, 6, options) as agents:
            agents.heard(0, "first")
            ranks.store.set("go on", "")
            ((seen, _, _),) = agents.returned()
        ranks.store.set("end", "")
        published = ranks.returned()[0]
    assert seen == sorted(seen)
    assert len(set(seen)) > 1
    assert set(seen) <= set(published)


def test_a_part_is_read_from_a_file_into_a_gpu(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    gpus = Lagging()
    gpus.devices[1].own(other.state_dict(keep_vars=True))
    gpus.put_in_place(gpus.devices[1], monkeypatch.setattr)
    file = ModelFile(other, tmp_path / "weights.safetensors")
    with gpus.noted():
        assert file.read(inventory(other, []).parameters) == 32
        found = [parameter.cpu() for parameter in other.parameters()]
    file.close()
    assert all(map(torch.equal, found, model.parameters()))


def test_random_generators_of_gpus_go_to_all_ranks(monkeypatch):
    states = {index: torch.full((16,), index, dtype=torch.uint8) for index in (0, 1, 2, 3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: states[index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: states.update({index: state}))
    mine, theirs = ([SimpleNamespace(index=index) for index in indices] for indices in ((0, 1), (2, 3)))
    state = staging.random_state(mine)
    drawn = torch.rand(3)
    staging.set_random_state(theirs, state)
    assert torch.equal(torch.rand(3), drawn)
    assert [states[index][0].item() for index in (2, 3)] == [0, 1]


def test_ranks_may_have_other_gpus():
    one, other = (described(SimpleNamespace(args=(2, torch.device("cuda", i)), kwargs={})) for i in (0, 1))
    assert one == other == ((2, "a device"), {})


def test_native_lanes_refuse_a_step_on_a_gpu(monkeypatch):
    work = mixed()
    captured = captured_for(work.step, work.model, work.optimizer, work.batches[0])
    plan = Plan((Lane("all", captured.graph.order),))
    monkeypatch.setattr(native_lanes, "input_tensors", lambda captured: {0: SimpleNamespace(is_cuda=True)})
    fails(ExecutionError, "the step is on a GPU", executor, captured, plan, kind="native")
    assert isinstance(executor(captured, plan), ThreadLanes)
