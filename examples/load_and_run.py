"""Weights that arrive while the first forward runs.

python examples/load_and_run.py
"""

import tempfile
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import nn

import hocket


def net(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))


def main(layers: int = 16, width: int = 1024) -> bool:
    torch.manual_seed(0)
    trained = net(layers, width).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(trained.state_dict(), path)
        with torch.device("meta"):
            model = net(layers, width).eval()  # no memory yet
        batch = torch.randn(8, width)
        start = perf_counter()
        hocket.load(model, path, device="cpu")
        with torch.no_grad():
            output = model(batch)  # each layer waits for its own weights
        print(f"first output after {(perf_counter() - start) * 1e3:.0f} ms")
    with torch.no_grad():
        is_same = torch.equal(output, trained(batch))
    print("same output as the trained model" if is_same else "another output")
    return is_same


if __name__ == "__main__":
    main()
