"""Every loop runs on one thread, and none for ever."""

import pytest
import torch

from loops.runner import time_limit


@pytest.fixture(autouse=True)
def limited(request):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with time_limit(900 if request.node.get_closest_marker("slow") else 90):
        yield
    torch.set_num_threads(before)
