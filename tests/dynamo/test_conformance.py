"""Every small program leaves by regions what it leaves in eager, bit for bit."""

import pytest
import torch

from dynamo.programs import PROGRAMS
from quick import some
from support.regions import made_regions, run_program, same

# Enough for a region to be recorded, verified, profiled, and to run its plan.
NUM_CALLS = 26
# Programs whose graphs all run op by op: complex numbers, or next to no ops.
OP_BY_OP = {"complex", "none"}
# Programs in which AOTAutograd itself computes other bits than eager, so that Dynamo's graph stays as it is: it casts a
# weight at each use, where autocast casts it once. Without AVX-512 the products of a GRU cell round otherwise, too. And
# a program that writes into its input and returns two values: AOTAutograd gives zeros where one gets no gradient.
AS_THEY_STAND = {"autocast", "into_row"} | ({"gru_cell"} if not torch.cpu._is_avx512_supported() else set())
pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore:::torch", "ignore:.*autograd.function.Function", "ignore:The .grad"),
]


@pytest.mark.parametrize("name", some(PROGRAMS))
def test_regions_leave_eagers_bits(name: str) -> None:
    make, batch = PROGRAMS[name]
    with made_regions() as regions:
        found = run_program(make, batch, "hocket", NUM_CALLS)
    assert same(found, run_program(make, batch, None, NUM_CALLS))
    assert bool(regions) == (name not in OP_BY_OP)
    verdicts = [region.verdict for region in regions]  # a branch that is not taken often is still being searched for
    if name in AS_THEY_STAND:
        assert set(verdicts) == {"plain"}
        assert "other bits than eager" in regions[0].why
        return
    assert "plain" not in verdicts, [region.why for region in regions]
    assert "planned" in verdicts or not regions
