"""What rank 0 finds, told as text: values, and failures, too."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from distributed.ranks import Ranks
from hocket.distributed.pipelines.first_rank import made_by_first_rank
from hocket.errors import PeerError


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
    with Ranks(hear, 2, fails) as ranks:
        found = ranks.returned()
    if fails:
        assert found == ["ValueError: no such node", "PeerError: rank 0 failed: ValueError: no such node"]
    else:
        assert found[0] == found[1] == {"linear": [1.5, 3.0], "\u00fc": "x" * 1000}
