"""Hugging Face's Trainer: the model is compiled before the trainer gets it.

python examples/with_transformers.py 200
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main(steps: int = 200) -> float:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.compile(backend="hocket")

    rows = (torch.arange(16) + torch.randint(0, 40, (400, 1))) % 64  # each row counts
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        result = Trainer(model, arguments, train_dataset=data).train()
    print(f"loss {result.training_loss:.3f}")
    return float(result.training_loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
