"""Memory on streams: no block is read or given away too early, and pools keep the limit that their plan states."""

import random
from functools import partial

import pytest
import torch

from equivalence.test_lanes import JOBS, captured_twins
from hocket import zoo
from hocket.execution.streams import StreamLanes
from hocket.ir import Lane, Machine, Plan
from hocket.planning import plan
from hocket.planning.critical_path import serial_peak_bytes
from hocket.planning.critical_path.memory import pool_bytes
from hocket.planning.critical_path.planner import PEAK_RATIO
from hocket.profiling.gpu import estimate_gpu
from hocket.tracing.capturing import capture_step
from support.allocating_streams import AllocatingStreams
from support.random_plans import on_lanes, on_streams, random_order

pytestmark = pytest.mark.usefixtures("one_thread")
A100 = Machine.preset("a100")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
NETS = [
    *(("lenet", {"batch_size": 64}), ("digits-cnn", {}), ("mlp", {})),
    SLOW("lstm-cells", {}),
    SLOW("dcgan", {"batch_size": 16}),
    SLOW("transformer", {}),
    SLOW("lstm-lm", {}),
    SLOW("pointnet-cls", {"batch_size": 2}),
    SLOW("bert-medium", {"batch_size": 1}),
    *(SLOW(name, {"image_size": 64, "batch_size": 4}) for name in ("googlenet", "resnet18", "resnet50", "vgg16")),
    *(SLOW(name, {"image_size": 96, "batch_size": 2}) for name in ("alexnet", "mobilenet-v2", "inception-v3")),
    *(SLOW(name, {"batch_size": 16}) for name in ("resnet20", "densenet40")),
]


@pytest.mark.parametrize(("name", "size"), NETS)
def test_the_pools_of_all_streams_keep_within_a_tenth_of_eagers_memory(name: str, size: dict[str, int]) -> None:
    job = zoo.load(name, **size)
    job.step(job.batch(0))
    captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
    graph = captured.graph
    made = plan(graph, estimate_gpu(graph, A100), A100, planner="critical-path")
    assert made.peak_bytes <= PEAK_RATIO * serial_peak_bytes(graph) + 1
    lasting = sum(buffer.size_bytes for buffer in graph.buffers if buffer.life in ("lasting", "input"))
    device = AllocatingStreams()
    lanes = StreamLanes(captured, made, device=device)
    for number in range(2):
        lanes(job.batch(number))
    assert not device.problems
    # Ops make values that no other op reads, such as the unused results of a backward.
    assert device.pool_bytes <= (pool_bytes(graph, made) - lasting) * 1.05
    eager = AllocatingStreams()
    order = Plan((Lane("gpu0.0", graph.order, "stream", "gpu0"),))
    lanes = StreamLanes(captured, order, device=eager)
    lanes(job.batch(0))
    assert device.pool_bytes + lasting <= PEAK_RATIO * (eager.pool_bytes + lasting) * 1.01


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 100))])
@pytest.mark.parametrize("name", JOBS)
def test_random_plans_race_nowhere_and_reuse_no_block_early(name: str, seed: int) -> None:
    pair, _, captured = captured_twins(JOBS[name], True)
    chance = random.Random(f"{name} {seed}")
    for _ in range(2 if seed == 0 else 26):  # more than 10,000 in all
        made = on_streams(on_lanes(random_order(captured.graph, chance), chance.randint(2, 5), chance))
        device = AllocatingStreams()
        lanes = StreamLanes(captured, made, device=device)
        lanes(pair.planned.batch(0))
        lanes(pair.planned.batch(1))
        assert not device.problems, made


def test_a_wait_that_is_left_out_is_noticed_where_it_matters() -> None:
    """But for three that order lanes after the caller's work, and one that keeps effects in order around a draw."""
    pair, _, captured = captured_twins(JOBS["small net"], True)
    chance = random.Random(1)
    made = on_streams(on_lanes(random_order(captured.graph, chance), 3, chance))
    whole = AllocatingStreams()
    StreamLanes(captured, made, device=whole)(pair.planned.batch(0))
    noticed = set()
    for number in range(1, whole.num_waits + 1):
        device = AllocatingStreams(left_out=number)
        lanes = StreamLanes(captured, made, device=device)
        lanes(pair.planned.batch(0))
        lanes(pair.planned.batch(1))
        if device.problems:
            noticed.add(number)
    assert len(noticed) >= whole.num_waits - 4, noticed


@pytest.mark.parametrize("seed", range(3))
def test_what_follows_a_step_that_raised_comes_after_all_that_it_launched(seed: int) -> None:
    pair, _, captured = captured_twins(JOBS["transformer"], True)
    chance = random.Random(seed)
    device = AllocatingStreams()
    made = on_streams(on_lanes(random_order(captured.graph, chance), 3, chance))
    inputs, targets = pair.planned.batch(0)
    with pytest.raises(IndexError):
        StreamLanes(captured, made, device=device)((inputs, torch.full_like(targets, 10_000)))
    for parameter in pair.planned.model.parameters():
        device.access(device.current(), parameter, True, "the caller's")
    assert not device.problems
