"""Lightning's Trainer: the net within the module is compiled, not the module, whose step belongs to Lightning.

python examples/with_lightning.py 300
"""

import sys

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.net.compile(backend="hocket")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(), data)
    loss = float(trainer.callback_metrics["loss"])
    print(f"loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
