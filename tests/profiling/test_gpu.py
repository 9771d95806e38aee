"""The analytic model of a GPU: by hand, and against measured times that it was not fitted to one by one."""

import math

import pytest
import torch
from hypothesis import given

from hocket.errors import ExecutionError, InputError
from hocket.ir import Buffer, Device, Edge, Graph, Lane, Machine, Op, Plan
from hocket.profiling.gpu import GpuModel, estimate_gpu
from hocket.profiling.tracer import trace_streams
from hocket.simulation import simulate
from hocket.tracing import capture
from strategies import touching_graphs
from support.steps import update
from support.strict_cuda import CaptureRefusedError, StrictCuda

P100 = Machine.preset("p100")
KERNEL_US = GpuModel().kernel_us

# DeepBench, results/train/DeepBench_NV_P100.xlsx: side, channels in, batch, channels out, kernel, padding, stride, and
# milliseconds of forward, activation gradient and weight gradient.
DEEPBENCH = [
    (56, 64, 16, 64, 3, 1, 1, 0.360, 0.360, 0.743),
    (28, 128, 16, 128, 3, 1, 1, 0.283, 0.282, 0.275),
    (14, 256, 16, 256, 3, 1, 1, 0.285, 0.280, 0.285),
    (7, 512, 16, 512, 3, 1, 1, 0.532, 0.532, 0.357),
    (56, 64, 16, 256, 1, 0, 1, 0.292, 0.271, 0.492),
    (28, 512, 16, 128, 1, 0, 1, 0.237, 0.295, 0.295),
    (14, 1024, 16, 256, 1, 0, 1, 0.244, 0.288, 0.345),
    (7, 512, 16, 2048, 1, 0, 1, 0.246, 0.379, 0.408),
    (112, 64, 8, 128, 3, 1, 1, 1.211, 1.080, 1.903),
    (28, 256, 8, 512, 3, 1, 1, 1.104, 1.065, 0.704),
]


def convolution(side, channels, batch, out_channels, kernel, padding, stride, role: str) -> Graph:
    out_side = (side + 2 * padding - kernel) // stride + 1
    sizes = {
        "x": 4.0 * batch * channels * side**2,
        "w": 4.0 * out_channels * channels * kernel**2,
        "y": 4.0 * batch * out_channels * out_side**2,
    }
    made = {"forward": "y", "activation_grad": "x", "weight_grad": "w"}[role]
    flops = 2.0 * sizes["y"] / 4 * channels * kernel**2
    read = tuple(name for name in sizes if name != made)
    op = Op("conv", "aten.convolution", role, "", flops, sum(sizes.values()), reads=read, writes=(made,))
    return Graph((op,), buffers=tuple(Buffer(name, size) for name, size in sizes.items()))


@pytest.mark.parametrize(("role", "column"), [("forward", 7), ("activation_grad", 8), ("weight_grad", 9)])
def test_convolutions_take_about_what_deepbench_measured(role, column):
    ratios = []
    for row in DEEPBENCH:
        costs = estimate_gpu(convolution(*row[:7], role), P100)
        ratios.append(costs.duration_us("conv", device="gpu0") / (row[column] * 1e3))
    assert all(1 / 2.5 < ratio < 2.5 for ratio in ratios)
    assert 0.75 < math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.35


def test_a_kernel_of_few_blocks_leaves_room_and_a_wave_too_many_costs_a_whole_one():
    machine = Machine((Device("gpu0", "cuda", 4, flops_per_s=1e12, bytes_per_s=1e15),))

    def share_and_us(tiles: int) -> tuple[float, float]:
        results = tiles * 128 * 64
        op = Op("mm", "aten.mm", "forward", "", 2.0 * 512 * results, 4.0 * results, writes=("y",))
        costs = estimate_gpu(Graph((op,), buffers=(Buffer("y", 4.0 * results),)), machine)
        return costs.shares["mm"]["gpu0"].multiprocessors, costs.duration_us("mm", device="gpu0") - KERNEL_US

    one, full, more = share_and_us(1), share_and_us(8), share_and_us(9)
    assert one[1] == pytest.approx(full[1])
    assert more[1] == pytest.approx(2 * full[1])
    assert full[0] == pytest.approx(8 * one[0])
    assert more[0] == pytest.approx(9 / 16, rel=0.02)


def test_what_moves_bytes_takes_the_bandwidth_it_can_reach():
    ops = (Op("large", "aten.add_", size_bytes=1.2e9), Op("small", "aten.add_", size_bytes=1200.0))
    costs = estimate_gpu(Graph(ops), P100)
    assert costs.duration_us("large", device="gpu0") == pytest.approx(KERNEL_US + 1.2e9 / (7.32e11 * 0.7) * 1e6)
    assert costs.shares["large"]["gpu0"].bandwidth == pytest.approx(1.0, rel=0.01)
    assert KERNEL_US < costs.duration_us("small", device="gpu0") < KERNEL_US + 0.01
    assert costs.shares["small"]["gpu0"].multiprocessors < 0.01


def test_results_are_known_from_buffers_or_else_from_edges():
    size = 4.0 * 128 * 64 * 112
    op = Op("mm", "aten.mm", "forward", "", 1e9, 3 * size)
    with_edges = estimate_gpu(Graph((op, Op("next")), (Edge("mm", "next", size),)), P100)
    named = Op("mm", "aten.mm", "forward", "", 1e9, 3 * size, writes=("y",))
    with_buffers = estimate_gpu(Graph((named, Op("next")), buffers=(Buffer("y", size),)), P100)
    assert with_edges.durations_us["mm"] == with_buffers.durations_us["mm"]
    assert with_edges.sources["mm"] == "analytic"


@given(graph=touching_graphs())
def test_no_kernel_asks_for_more_than_there_is(graph):
    costs = estimate_gpu(graph, P100)
    for op in graph.ops:
        assert costs.duration_us(op.name, device="gpu0") >= KERNEL_US
        share = costs.shares[op.name]["gpu0"]
        assert 0 < share.multiprocessors <= 1
        assert 0 <= share.bandwidth <= 1


def test_a_device_without_rates_is_refused():
    for machine in (Machine.of(cores=2), Machine((Device("gpu0", "cuda", 4),))):
        with pytest.raises(InputError, match="device 'gpu0' is no GPU with flops_per_s and bytes_per_s"):
            estimate_gpu(Graph((Op("a"),)), machine)


def test_two_kernels_that_each_fill_the_gpu_do_not_overlap_in_a_simulation():
    pair = Plan(tuple(Lane(f"s{n}", (f"op{n}",), "stream", "gpu0") for n in range(2)))
    spans = {}
    for size_bytes in (2e8, 2e4):
        graph = Graph(tuple(Op(f"op{n}", "aten.add", size_bytes=size_bytes) for n in range(2)))
        costs = estimate_gpu(graph, P100)
        alone_us = costs.duration_us("op0", device="gpu0")
        spans[size_bytes] = simulate(graph, pair, costs, P100).makespan_us / alone_us
    assert spans[2e8] == pytest.approx(2.0, abs=0.02), "but for the latency of a launch"
    assert spans[2e4] == pytest.approx(1.0, abs=0.02), "small ones run side by side"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_ops_on_a_gpu_are_timed_by_events_on_copies_of_everything(optimizer):
    model = torch.nn.Linear(4, 2)
    updates = optimizer(model.parameters(), lr=0.1)

    def step(batch):
        return update(updates, model(batch).square().sum())

    step(torch.ones(2, 4))
    captured = capture(step, model, updates, torch.ones(2, 4))
    before = [tensor.clone() for tensor in captured.state().values()]
    costs = trace_streams(captured, StrictCuda(), 3)
    assert all(map(torch.equal, before, captured.state().values()))
    assert [costs.duration_us(op, device="gpu0") for op in captured.graph.order] == [1.0] * len(captured.graph)
    refusing = StrictCuda(lambda capture, op: (_ for _ in ()).throw(CaptureRefusedError("not permitted")))
    with pytest.raises(ExecutionError, match="CUDA graph: CaptureRefusedError: not permitted"):
        trace_streams(captured, refusing, 1)
