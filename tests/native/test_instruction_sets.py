"""Forms that round otherwise, with the instructions of other processors: torch's, oneDNN's and MKL's switches."""

import os
import subprocess
import sys

import pytest

from hocket.native import available

pytestmark = pytest.mark.skipif(not available(), reason=available().why)

SETS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}

# A small ResNet's stage: convolutions of 3 x 3 and 4 x 4, norms with an addition, and a deep sum.
PROGRAM = """
import torch
from torch import nn
from hocket.autotune.closeness import MAX_SAMPLES
from hocket.autotune.forms import rewritten
from hocket.tracing.capturing import capture_step
from hocket.tracing.variants import rewrites_of
from support.captures import closeness

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.other(self.second(torch.relu(self.norm(self.first(x))))) + x)


model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.Conv2d(16, 32, 4, 2, 1), Block(32), nn.Flatten())
model.append(nn.Linear(32 * 64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = [(torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))) for _ in range(MAX_SAMPLES)]


def step(batch):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


for batch in batches[:2]:
    step(batch)
plain = capture_step(step, model, optimizer, batches[0])
forms = rewrites_of("", plain)
print(torch.backends.cpu.get_cpu_capability(), *forms)
for form in forms:
    seen = closeness(plain, rewritten(plain, form), step, batches[0], samples=MAX_SAMPLES, threads=1)
    assert seen.holds, (form, seen.why)
"""


@pytest.mark.parametrize("name", ["avx2", pytest.param("none", marks=pytest.mark.slow)])
def test_every_form_is_close(name: str) -> None:
    env = os.environ | SETS[name] | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr
    assert "winograd" in ran.stdout
    assert "fused-norm" in ran.stdout
