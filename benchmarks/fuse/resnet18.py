"""Two experiments of HFTA with ResNet-18: curves at three rates (Appendix D) and partial fusion (Appendix H.4).

Source: Wang et al., *Horizontally Fused Training Array*, MLSys 2021. The paper trains on CIFAR-10 on a V100. Here the
images are scikit-learn's digits, enlarged to 32 x 32, since nothing can be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.bench import table_of
from benchmarks.turns import in_turns
from hocket import optim, zoo
from hocket.fusion import fuse

RATES = (0.003, 0.01, 0.03)
MOMENTUM = 0.9
STAGES = [f"features.stage{stage}.unit{unit}" for stage in (4, 3, 2, 1) for unit in (2, 1)]
# From the last block to the first, as the paper turns fusion off.
SEPARATE = [STAGES[:count] for count in (0, 2, 4, 6, 8)]


def digits(
    batch_size: int, dtype: torch.dtype = torch.float32
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return batches of the first 1,536 digits, and the others for validation."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=dtype)[:, None].repeat(1, 3, 1, 1) / 16
    images, labels = interpolate(images, size=32, mode="bilinear"), torch.tensor(found.target)
    trained = list(zip(images[:1536].split(batch_size), labels[:1536].split(batch_size), strict=True))
    return trained, (images[1536:], labels[1536:])


def models(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Return ResNet-18s of as many seeds."""
    jobs = [zoo.load("resnet18", seed=seed, image_size=32, num_batches=1) for seed in range(count)]
    return [job.models[0].to(dtype) for job in jobs]


def curves(steps: int, dtype: torch.dtype = torch.float64, batch_size: int = 32) -> dict[str, Any]:
    """Train three models alone and as one, each with its own rate, and return their losses and accuracies.

    In float32 rounding alone leads two trainings of one model apart after some ten steps, so float64 is what shows that
    they are the same.
    """
    batches, (images, labels) = digits(batch_size, dtype)
    alone, array = models(len(RATES), dtype), fuse(models(len(RATES), dtype))
    optimizers = [torch.optim.SGD(each.parameters(), lr, MOMENTUM) for each, lr in zip(alone, RATES, strict=True)]
    fused = optim.SGD(array.parameters(), lr=list(RATES), momentum=MOMENTUM)
    losses: dict[str, list[list[float]]] = {"alone": [], "fused": []}
    for step in range(steps):
        x, y = batches[step % len(batches)]
        row = []
        for model, optimizer in zip(alone, optimizers, strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            row.append(loss.item())
        losses["alone"].append(row)
        fused.zero_grad()
        own = array.losses(cross_entropy, x, y)
        own.sum().backward()
        fused.step()
        losses["fused"].append(own.tolist())
    ways = {"alone": alone, "fused": array.unfuse()}
    accuracy = {way: [_accuracy(model, images, labels) for model in each] for way, each in ways.items()}
    return {"rates": RATES, "dtype": str(dtype), "batch_size": batch_size, "losses": losses, "accuracy": accuracy}


def partial(rounds: int, num_models: int = 4, batch_size: int = 8) -> dict[str, Any]:
    """Return seconds of a step of models of which more and more blocks stay separate, in turns."""
    batch = digits(batch_size)[0][0]
    steps = {str(len(names)): _step(num_models, names, batch) for names in SEPARATE}
    steps["serial"] = _serial(num_models, batch)
    for step in steps.values():
        for _ in range(2):  # these record, and time the ways to compute
            step(None)
    ms = in_turns(steps, rounds=rounds, block=1, warm_up=0)
    return {
        "models": num_models,
        "batch_size": batch_size,
        "seconds": {name: [each / 1e3 for each in own] for name, own in ms.items()},
        "to_serial": {name: median(ms["serial"]) / median(own) for name, own in ms.items()},
    }


def run(steps: int = 24, rounds: int = 20) -> dict[str, Any]:
    """Run the curves if there are `steps`, and partial fusion if there are `rounds`."""
    found = {"curves": curves(steps)} if steps else {}
    return found | ({"partial": partial(rounds)} if rounds else {})


def _step(num_models: int, separate: list[str], batch: tuple[Tensor, Tensor]) -> Callable[[Any], None]:
    array = fuse(models(num_models), separate=separate, backend="rule")
    optimizer = optim.SGD(array.parameters(), lr=0.01, momentum=MOMENTUM)

    def step(_: Any) -> None:
        optimizer.zero_grad()
        array.losses(cross_entropy, *batch).sum().backward()
        optimizer.step()

    return step


def _serial(num_models: int, batch: tuple[Tensor, Tensor]) -> Callable[[Any], None]:
    jobs = [(model, torch.optim.SGD(model.parameters(), 0.01, MOMENTUM)) for model in models(num_models)]

    def step(_: Any) -> None:
        for model, optimizer in jobs:
            optimizer.zero_grad()
            cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

    return step


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    if "curves" in result:
        found = result["curves"]
        alone, fused = found["losses"]["alone"], found["losses"]["fused"]
        rows = [
            {
                **{"rate": rate, "alone": alone[-1][k], "fused": fused[-1][k]},
                "apart": max(abs(a[k] - b[k]) for a, b in zip(alone, fused, strict=True)),
                "accuracy": {way: own[k] for way, own in found["accuracy"].items()},
            }
            for k, rate in enumerate(found["rates"])
        ]
        columns = {
            **{"rate": "{rate:g}", "last loss, alone": "{alone:.4f}", "fused": "{fused:.4f}"},
            **{"largest difference": "{apart:.1e}", "accuracy, alone": "{accuracy[alone]:.3f}"},
            "fused accuracy": "{accuracy[fused]:.3f}",
        }
        yield table_of(f"ResNet-18 on digits, {len(alone)} steps, {found['dtype']}", columns, rows)
    if "partial" in result:
        part = result["partial"]
        gains = [{"blocks": name, "gain": gain} for name, gain in part["to_serial"].items()]
        columns = {"blocks": "{blocks}", "speedup over serial": "{gain:.2f}"}
        yield table_of(f"{part['models']} ResNet-18: separate blocks", columns, gains)
