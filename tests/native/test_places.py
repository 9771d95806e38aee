"""Native reads of Python places: what stands there, where something else stood before."""

import pytest
import torch

from hocket import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native core")


@pytest.mark.parametrize("value", [None, 1, "text", [torch.ones(2)]])
def test_value_of_another_type_is_seen_at_each_read(value):
    """A dict that was not written to since a read that failed still holds what made it fail."""
    table = {"weight": torch.ones(2)}
    check = native.load().Signature((), [], True)
    place = check.add_item(check.add_object(table), "weight")
    check.expect_parameter(place)
    assert check.holds(())
    table["weight"] = value
    assert [check.holds(()) for _ in range(3)] == [False] * 3
    table["weight"] = torch.ones(2)
    assert check.holds(())
