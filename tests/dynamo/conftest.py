import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Nothing is compiled yet when a test begins."""
    torch._dynamo.reset()
