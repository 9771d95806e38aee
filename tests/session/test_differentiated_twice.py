"""Lines for which a step has no regions. They stand in a file of their own, since regions ask the file of the step."""

from unittest import mock

import pytest

from hocket import step_regions

LINES = {
    "loss.backward(create_graph=True)": True,
    "grads = torch.autograd.grad(loss, inputs)": True,
    "torch.autograd.functional.hessian(f, x)": True,
    "from torch.autograd import grad, Variable": True,
    "from torch.autograd import Variable, grad": True,
    "from torch.autograd import (": True,
    "from torch.autograd import *": True,
    "from torch.autograd import Variable  # for old torch": False,
    "from torch.autograd import Function as F": False,
    "with torch.autograd.set_detect_anomaly(True):": False,
}


@pytest.mark.parametrize(("line", "may_be"), LINES.items())
def test_a_step_whose_code_may_differentiate_twice_has_no_regions(line: str, may_be: bool) -> None:
    code = compile("", "penalties.py", "exec")
    with mock.patch("linecache.getlines", return_value=[f"{line}\n"]):
        assert step_regions._takes_gradients_itself([code]) is may_be
