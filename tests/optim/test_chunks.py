"""Division of an update, and the threads of its parts."""

import pytest
import torch

from hocket import optim
from hocket.optim.chunks import GRAIN

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize(("elements", "threads"), [(GRAIN // 2, 1), (GRAIN, 2)])
def test_one_thread_updates_what_is_small(monkeypatch: pytest.MonkeyPatch, elements: int, threads: int):
    p = torch.nn.Parameter(torch.ones(2, elements))
    optimizer = optim.SGD([p], lr=0.5, num_models=2)
    seen = []
    kernel = torch._fused_sgd_

    def watched(*args, **kwargs):
        seen.append(torch.get_num_threads())
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", watched)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert seen == [threads]
    assert p.detach().eq(0.5).all()
    assert torch.get_num_threads() == 2


def test_the_number_of_threads_survives_an_error(monkeypatch: pytest.MonkeyPatch):
    p = torch.nn.Parameter(torch.ones(2, 16))
    optimizer = optim.SGD([p], lr=0.5, num_models=2)

    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(torch, "_fused_sgd_", broken)
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert torch.get_num_threads() == 2
