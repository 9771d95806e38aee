"""Models cut into stages: where, with which gradients, and what rank 0 tells the others, as text."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import pipeline

import hocket
from distributed.pipelines.trained import Tied, UNet, gradients_by_stages, model_and_batch, train_stage
from distributed.ranks import returned
from hocket.distributed.pipelines.split import SCHEDULES, has_one_stage_a_rank, made_by_first_rank
from hocket.distributed.pipelines.traced import chain_of, inline_grad_modes, join_aliases, node_times
from hocket.errors import InputError, PeerError
from hocket.ir import Link
from quick import covering
from support.refusals import refused

# Torch 2.13 copies its own tree specifications in a way that it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


def traced_of(model, *batch):
    traced = torch.export.export(model, batch, strict=False).module(check_guards=False)
    inline_grad_modes(traced)
    join_aliases(traced)
    return traced


@pytest.mark.parametrize(("stages", "name"), covering([2, 3, 4], ["tied", "unet", "heads"]))
def test_stages_compute_eagers_output_and_gradients(name, stages):
    model, batch = model_and_batch(name)
    pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(stages))
    assert pipe.num_stages == stages
    output, found = gradients_by_stages(pipe, batch)
    eager, _ = model_and_batch(name)
    expected = eager(batch)
    expected.square().mean().backward()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert set(found) == {name for name, _ in eager.named_parameters()}
    for parameter, value in eager.named_parameters():
        torch.testing.assert_close(found[parameter], value.grad, rtol=1e-10, atol=1e-14)


MODELS = ["gpt2", "llama", "resnet18", "unet", "tied"]
# model, stages, schedule, ranks
QUICK = [("tied", 2, "1f1b", 2), ("tied", 4, "interleaved1f1b", 2), ("twice", 4, "interleavedzerobubble", 2)]
QUICK += [("heads", 2, "1f1b", 2), ("heads", 4, "interleavedzerobubble", 2)]
SLOW = [(name, 2 if has_one_stage_a_rank(of) else 4, of, 2) for name in MODELS for of in sorted(SCHEDULES)]
SLOW += [(name, stages, "1f1b", stages) for name in MODELS for stages in (2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "stages", "schedule", "ranks"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in dict.fromkeys(SLOW) if each not in QUICK)],
)
def test_stages_run_on_ranks_with_eagers_gradients(name, stages, schedule, ranks):
    found = returned(train_stage, ranks, name, stages, schedule, ranks, timeout_s=200.0)
    assert all(stage for stage in found)
    assert max(error for stage in found for error in stage.values()) <= 1e-10


def test_the_slowest_stage_is_as_fast_as_it_can_be():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    costs = {f"linear{f'_{n}' if n else ''}": takes_us for n, takes_us in enumerate((1e3, 1e3, 1e3, 1e3, 1e3, 5e3))}
    policy = hocket.split_policy(2, costs=costs, links=Link("a", "b", 1e9, 0.0))
    pipe = pipeline(model, (torch.randn(2, 4),), split_policy=policy)
    assert [len(list(pipe.get_stage_module(stage).parameters())) for stage in (0, 1)] == [10, 2]


def test_cuts_avoid_what_costs_much_to_hand_on():
    class Hourglass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 4096)
            self.narrow = nn.Linear(4096, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, value):
            return self.last(self.narrow(self.wide(value)))

    costs = {"linear": 10.0, "linear_1": 10.0, "linear_2": 10.0}
    policy = hocket.split_policy(2, costs=costs, links=Link("a", "b", 1e9, 0.0))
    pipe = pipeline(Hourglass(), (torch.randn(64, 4),), split_policy=policy)
    assert [name for name, _ in pipe.get_stage_module(1).named_parameters()] == ["last.weight", "last.bias"]


def test_memory_decides_where_to_cut():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    costs = {"linear": 1.0, "linear_1": 1.0, "linear_2": 1.0, "linear_3": 9.0}
    options = {"costs": costs, "links": Link("a", "b", 1e12, 0.0)}
    batch = torch.randn(1, 64)

    def first_stage(**more):
        pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(2, **options, **more))
        return len(list(pipe.get_stage_module(0).parameters())) // 2

    layer_bytes = 2 * 4 * 65 * 64
    assert first_stage() == 3
    assert first_stage(memory_bytes=2.3 * layer_bytes) == 2
    with pytest.raises(Exception, match="no 2 stages of 4 ops fit into") as failed:
        first_stage(memory_bytes=1.5 * layer_bytes)
    assert isinstance(failed.value, InputError)


def test_nothing_is_cut_off_from_what_changes_it_in_place():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.linear = nn.Linear(4, 4)

        def forward(self, value):
            value = self.linear(self.norm(value))
            value.view(-1).relu_()
            return value * 2

    traced = traced_of(InPlace().train(), torch.randn(8, 4))
    ops, chain = chain_of(traced, node_times(traced))
    allowed = [node.name for node, size in zip(ops, chain.crossing_bytes, strict=True) if size < float("inf")]
    assert "relu_" not in allowed
    assert "view" not in allowed
    assert {"linear", "mul"} <= set(allowed)


def test_measuring_leaves_buffers_and_random_numbers_alone():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    traced = traced_of(model, torch.randn(8, 4))
    before, state = {name: value.clone() for name, value in traced.named_buffers()}, torch.get_rng_state()
    times = node_times(traced)
    assert min(times["linear"]) > 0
    assert all(torch.equal(value, before[name]) for name, value in traced.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "at least one stage and micro-batch, got 0"),
        ({"k": 3, "microbatches": 2}, "2 micro-batches for 3 stages"),
        ({"k": 4, "microbatches": 1, "schedule": "loopedbfs"}, "1 micro-batches for 2 ranks"),
        ({"k": 2, "schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"k": 2, "ranks": 0}, "at least one stage"),
        ({"k": 4, "ranks": 2}, "one stage for each rank, got 4 stages for 2 ranks"),
    ],
)
def test_options_that_make_no_sense(options, message):
    refused(message, hocket.split_policy, **options)


def test_backwards_are_measured_where_there_are_any():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2000, 64)
            self.linear = nn.Linear(32, 4)

        def forward(self, tokens):
            first, second = self.embedding(tokens).chunk(2, dim=-1)
            return self.linear(torch.tanh(first) + second), tokens.sum().item()

    traced = traced_of(Net(), torch.zeros(2, 4, dtype=torch.long))
    times = node_times(traced)
    kinds = {node.name: node for node in traced.graph.nodes}
    backward = {name: us for name, (_, us) in times.items()}
    assert backward["embedding"] > 0  # a gradient of the whole table
    assert all(backward[name] > 0 for name in ("tanh", "linear", "add"))
    assert all(backward[name] == 0 for name in ("sum_1",))
    assert set(times) == {name for name, node in kinds.items() if node.op == "call_function"}


def test_a_policy_says_which_stage_has_what():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    costs = {f"linear{f'_{n}' if n else ''}": 3.0 for n in range(4)}
    policy = hocket.split_policy(2, microbatches=4, costs=costs, links=Link("a", "b", 1e12, 0.0))
    assert policy.cut is None
    pipeline(model, (torch.randn(2, 8),), split_policy=policy)
    assert [(stage.ops, stage.in_flight) for stage in policy.cut.stages] == [(2, 2), (2, 1)]
    assert [stage.forward_us + stage.backward_us for stage in policy.cut.stages] == pytest.approx([6.0, 6.0])
    assert [stage.received_bytes for stage in policy.cut.stages] == [0.0, 64.0]
    assert [stage.kept_bytes for stage in policy.cut.stages] == [2 * 2 * 4 * 72, 2 * 2 * 4 * 72]
    # All but the slowest stage once, and the slowest four times.
    assert policy.cut.step_us == pytest.approx(5 * 6.0, rel=1e-3)


def test_too_many_stages_and_a_missing_cost():
    traced = traced_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    refused("3 stages, and there are 1 places to cut 2 ops at", hocket.split_policy(3), traced)
    with pytest.raises(InputError, match="no cost for node 'linear'"):
        hocket.split_policy(2, costs={})(traced_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)))


@pytest.mark.parametrize("model", [UNet, Tied])
def test_no_edge_leaves_out_a_stage(model):
    network, batch = model_and_batch("unet" if model is UNet else "tied")
    pipe = pipeline(network, (batch,), split_policy=hocket.split_policy(4))
    stages = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    number = {node: position for position, node in enumerate(stages)}
    for node in stages:
        for source in node.all_input_nodes:
            made = source.args[0] if source.op == "call_function" else source
            assert number.get(made, -1) == number[node] - 1


def hear(rank: int, say, fails: bool):
    dist.init_process_group("gloo", rank=rank, world_size=2)

    def make():
        assert rank == 0
        if fails:
            raise ValueError("no such node")
        return {"linear": [1.5, 3.0], "\u00fc": "x" * 1000}

    try:
        return made_by_first_rank(make)
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()


def test_alone_it_is_what_is_made():
    assert made_by_first_rank(lambda: [1, 2]) == [1, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_have_what_the_first_one_made(fails):
    found = returned(hear, 2, fails)
    if fails:
        assert found == ["ValueError: no such node", "PeerError: rank 0 failed: ValueError: no such node"]
    else:
        assert found[0] == found[1] == {"linear": [1.5, 3.0], "\u00fc": "x" * 1000}
