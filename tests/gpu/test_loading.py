"""Weights straight to a device, while the device computes."""

import pytest
import torch

from hocket.loading import finish, load

pytestmark = pytest.mark.gpu


def made(seed):
    torch.manual_seed(seed)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 50))
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("start", ["meta", "cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_is_that_of_the_stored_weights(tmp_path, start, dtype):
    safetensors = pytest.importorskip("safetensors.torch")
    x = torch.randn(8, 3, 32, 32, device="cuda")
    trained = made(1)
    path = tmp_path / "w.safetensors"
    safetensors.save_model(trained.to(getattr(torch, dtype)), str(path))
    model = made(2).to(start).eval()
    load(model, path, device="cuda")
    found = model(x)
    finish(model)
    plain = made(3)
    plain.load_state_dict(safetensors.load_file(path))
    assert torch.equal(found, plain.cuda().eval()(x))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
