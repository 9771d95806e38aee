from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.distributed.pipelines.split import torch_order
from hocket.errors import InputError
from hocket.planning.partition.pipeline_cut import Chain, cut_at, cut_chain, cut_for_schedule
from support.refusals import refused

LINK = {"latency_us": 0.0, "bytes_per_s": 1e6}


def chain_of(takes_us, crossing_bytes=None, kept=None, saved=None) -> Chain:
    forward = np.asarray(takes_us, float)
    zeros = np.zeros(len(forward))
    return Chain(
        forward,
        2 * forward,
        zeros if crossing_bytes is None else crossing_bytes,
        zeros if kept is None else kept,
        zeros if saved is None else saved,
    )


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=5, max_size=9),
    st.sampled_from(
        [("1f1b", 2, 2), ("1f1b", 3, 3), ("gpipe", 3, 3), ("interleaved1f1b", 4, 2), ("zbvzerobubble", 4, 2)]
    ),
)
def test_cuts_are_nearly_as_good_as_the_best_of_all(ops, schedule):
    name, stages, ranks = schedule
    order = torch_order(name, stages=stages, ranks=ranks, microbatches=4)
    chain = chain_of([us for us, _ in ops], [float(size) for _, size in ops])
    found = cut_for_schedule(chain, order, **LINK)
    best = min(cut_at(chain, b, order, **LINK).step_us for b in combinations(range(1, len(ops)), stages - 1))
    assert found.step_us <= 1.15 * best
    assert sum(stage.ops for stage in found.stages) == len(ops)
    assert sum(stage.forward_us for stage in found.stages) == pytest.approx(chain.forward_us.sum())


def test_what_a_rank_has_in_all_counts_where_it_has_several_stages():
    # Equal stages are not possible: the first and the third stage are rank 0's, so their sum has to be right.
    order = torch_order("interleaved1f1b", stages=4, ranks=2, microbatches=4)
    found = cut_for_schedule(chain_of([5.0, 1.0, 1.0, 5.0, 1.0, 1.0]), order, **LINK)
    loads = [sum(s.forward_us for s in found.stages if s.rank == rank) for rank in (0, 1)]
    assert max(loads) <= 8.0


def test_memory_of_all_stages_of_a_rank():
    order = torch_order("loopedbfs", stages=4, ranks=2, microbatches=2)
    chain = chain_of([1.0] * 6, kept=np.array([30.0, 10.0, 10.0, 30.0, 10.0, 10.0]))
    found = cut_for_schedule(chain, order, **LINK, memory_bytes=50.0)
    assert max(found.memory_bytes) <= 50.0
    assert sum(found.memory_bytes) == 100.0
    with pytest.raises(InputError, match=r"no cuts into 4 stages were found .* at most 45 bytes"):
        cut_for_schedule(chain, order, **LINK, memory_bytes=45.0)
    refused("no 4 stages of 6 ops fit into 25 bytes", cut_for_schedule, chain, order, **LINK, memory_bytes=25.0)


def test_what_does_not_fit_together():
    refused("kept_bytes has 1 values for 2 ops", Chain, [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0], [0.0, 0.0])
    order = torch_order("1f1b", stages=2, ranks=2, microbatches=2)
    refused("3 stages, and the schedule has 2", cut_at, chain_of([1.0, 1.0, 1.0]), (1, 2), order, **LINK)


def test_the_slowest_stage_is_as_fast_as_any_cuts_make_it():
    draw = np.random.default_rng(0)
    for _ in range(30):
        count, stages = int(draw.integers(4, 9)), int(draw.integers(1, 4))
        takes_us, crossing_us = draw.uniform(0, 10, count), draw.uniform(0, 5, count)
        crossing_us[draw.integers(1, count)] = np.inf

        def slowest(begins, takes_us=takes_us, crossing_us=crossing_us, count=count):
            borders = [0, *begins, count]
            border_us = [0.0, *(crossing_us[begin] for begin in begins), 0.0]
            return max(
                takes_us[borders[i] : borders[i + 1]].sum() + border_us[i] + border_us[i + 1]
                for i in range(len(borders) - 1)
            )

        best = min(slowest(begins) for begins in combinations(range(1, count), stages - 1))
        free = {"kept_bytes": [0.0] * count, "saved_bytes": [0.0] * count, "memory_bytes": None}
        found = cut_chain(takes_us, crossing_us, stages, **free, in_flight=[1] * stages)
        assert slowest(found) == pytest.approx(best)


def test_memory_counts_by_what_is_in_flight():
    chain = ([1.0] * 4, [0.0] * 4, 2)
    saved = {"kept_bytes": [0.0] * 4, "saved_bytes": [10.0] * 4, "memory_bytes": 40.0}
    assert cut_chain(*chain, **saved, in_flight=[2, 1]) == (2,)
    assert cut_chain(*chain, **saved, in_flight=[3, 1]) == (1,)
    refused("no 2 stages of 4 ops fit into 40 bytes each", cut_chain, *chain, **saved, in_flight=[5, 1])
    refused("5 stages, and there are 3 places to cut 4 ops at", cut_chain, *chain[:2], 5, **saved, in_flight=[1] * 5)
