from __future__ import annotations

import pytest

from hocket.errors import InputError
from hocket.ir import Costs, Machine
from hocket.ir.machine import Device
from hocket.simulation.hogs import hogged


def test_a_hog_slows_its_device_alone():
    machine = Machine((Device("x", cores=2), Device("y")))
    found = hogged(Costs({"a": {"1": 30.0, "x:2": 20.0}}), machine, {"x": 0.75})
    assert found.duration_us("a", width=2, device="x") == 80.0
    assert found.duration_us("a", width=1, device="y") == 30.0


@pytest.mark.parametrize("hogs", [{"z": 0.5}, {"x": 1.0}, {"x": -0.1}])
def test_hogs_that_cannot_be(hogs):
    with pytest.raises(InputError, match="expected a device of the machine and a part"):
        hogged(Costs({"a": {"1": 30.0}}), Machine((Device("x"),)), hogs)
