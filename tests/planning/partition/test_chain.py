from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from hocket.errors import InputError
from hocket.planning.partition.pipeline_cut import cut_chain


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
        assert slowest(cut_chain(takes_us, crossing_us, stages)) == pytest.approx(best)


def test_memory_counts_by_what_is_in_flight():
    chain = ([1.0] * 4, [0.0] * 4, 2)
    saved = {"saved_bytes": [10.0] * 4, "memory_bytes": 40.0}
    assert cut_chain(*chain, **saved, in_flight=[2, 1]) == (2,)
    assert cut_chain(*chain, **saved, in_flight=[3, 1]) == (1,)
    with pytest.raises(InputError, match="no 2 stages of 4 ops fit into 40 bytes each"):
        cut_chain(*chain, **saved, in_flight=[5, 1])
    with pytest.raises(InputError, match="5 stages, and there are 3 places to cut 4 ops at"):
        cut_chain(*chain[:2], 5)
