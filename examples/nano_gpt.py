"""A small GPT on characters, as nanoGPT trains it: warm-up, accumulation, clipping, bfloat16.

python examples/nano_gpt.py 300
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hocket

WIDTH, HEADS, LAYERS, CONTEXT, ACCUMULATE = 64, 4, 2, 32, 2
TEXT = "the quick brown fox jumps over the lazy dog. " * 200
CHARACTERS = sorted(set(TEXT))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.token(x) + self.place.weight[: x.shape[1]]
        return torch.as_tensor(self.head(self.blocks(value, mask=self.mask, is_causal=True)))


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    data = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, targets in zip(x.chunk(ACCUMULATE), y.chunk(ACCUMULATE), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(part).flatten(0, 1), targets.flatten()) / ACCUMULATE
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    fast = hocket.schedule(step, model, optimizer)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (8,))
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        loss = fast(rows[:, :-1], rows[:, 1:]).item()
        warmup.step()
    print(f"loss {loss:.3f}; the step is {fast.verdict} because {fast.why}")
    return loss


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
