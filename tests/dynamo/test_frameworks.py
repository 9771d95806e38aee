"""Trainers of other people, with models and updates by plan: losses and parameters are those without."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket.dynamo

pytestmark = pytest.mark.filterwarnings("default")

EPOCHS = 3
Run = tuple[list[float], list[torch.Tensor]]
# Schedules of the updates of one test.
UPDATES: list[hocket.Schedule] = []


class _Net(nn.Module):
    """Dropout draws and batch norm counts, so that a step made twice or left out shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU()
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def _data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 16, generator=generator), torch.randint(4, (200,), generator=generator)
    return DataLoader(TensorDataset(*rows), batch_size=10)


def _made(backend: str) -> _Net:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = _Net()
    if backend:
        net.compile(backend=backend)
    return net


def _updated(optimizer: torch.optim.Optimizer, backend: str) -> torch.optim.Optimizer:
    if backend:
        UPDATES.append(hocket.schedule_update(optimizer, guard=False, cache=False))
    return optimizer


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def _by_lightning(backend: str, folder: Path) -> Run:
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = _made(backend), []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = _updated(torch.optim.AdamW(self.parameters(), lr=1e-2), backend)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = Module()
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(names, False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", gradient_clip_val=1.0, default_root_dir=folder, **quiet
    )
    trainer.fit(module, _data())
    return module.seen, _state(module)


def _by_fabric(backend: str, folder: Path) -> Run:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu")
    net = _made(backend)
    model, optimizer = fabric.setup(net, _updated(torch.optim.AdamW(net.parameters(), lr=1e-2), backend))
    seen = []
    for _ in range(EPOCHS):
        for x, y in fabric.setup_dataloaders(_data()):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            seen.append(loss.item())
    return seen, _state(net)


def _by_accelerate(backend: str, folder: Path) -> Run:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _made(backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = accelerator.prepare(net, optimizer, _data())
    _updated(optimizer, backend)  # accelerate's, around the optimizer
    seen = []
    for _ in range(EPOCHS):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.append(loss.item())
    return seen, _state(net)


def _by_hand(backend: str, folder: Path) -> Run:
    """With a scaler of gradients, whose factor overflows now and then."""
    net = _made(backend)
    optimizer = _updated(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=7)
    seen = []
    for _ in range(EPOCHS):
        for x, y in _data():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen += [loss.item(), scaler.get_scale()]
    assert len(set(seen[1::2])) > 2
    return seen, _state(net)


def _by_transformers(backend: str, folder: Path) -> Run:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss"))
    if backend:
        model.compile(backend=backend)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(100, (16,), generator=generator) for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=60,
        per_device_train_batch_size=4,
        report_to=[],
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    optimizer = _updated(torch.optim.AdamW(model.parameters(), lr=1e-3), backend)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    return [line.get("loss") for line in trainer.state.log_history], _state(model)


@pytest.mark.parametrize("trained", [_by_hand, _by_lightning, _by_fabric, _by_accelerate, _by_transformers])
def test_a_trainer_ends_as_without_the_backend(trained: Any, tmp_path: Path) -> None:
    UPDATES.clear()
    losses, state = trained("", tmp_path)
    before = set(map(id, hocket.dynamo.regions()))
    found_losses, found_state = trained("hocket", tmp_path)
    made = [each for each in hocket.dynamo.regions() if id(each) not in before]
    assert made
    assert [str(each.verdict) for each in UPDATES] == ["planned"]
    assert found_losses == losses
    assert all(map(torch.equal, found_state, state))
