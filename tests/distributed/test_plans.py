"""What a worker's plan stands on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hocket.distributed import plans
from hocket.distributed.setup import PROBE_BYTES


class SlowWire:
    """Its transfers take so many seconds by a clock that only they move."""

    def __init__(self, clock, transfers_s):
        self.clock, self.left_s = clock, list(transfers_s)

    def receive(self, name, tensor, epoch, done):
        self.clock[0] += self.left_s.pop(0)
        done(None)


@pytest.mark.parametrize("late_s", [(0.0, 0.0), (5.0, 0.0), (5.0, 3.0)])
def test_a_server_that_is_late_does_not_count_as_a_slow_link(late_s, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(plans.time, "perf_counter", lambda: clock[0])
    wire = SlowWire(clock, [late_s[0] + 0.5, late_s[1] + 0.5, 0.5])
    made = SimpleNamespace(membership=SimpleNamespace(is_worker=True), wires=[wire])
    assert plans.link_rates(made) == [PROBE_BYTES / 0.5]
    assert not wire.left_s
