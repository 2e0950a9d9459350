"""A small language model that learns to continue text byte by byte, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 32
BATCH = 2
RANK = 8
"""Of adapters."""


class Adapted(nn.Module):
    """A linear layer with a trainable difference of low rank, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.base(x) + self.up(self.down(x))
        return changed


class Block(nn.Module):
    """Attention to what came before, and two layers on top."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before = nn.LayerNorm(width)
        self.mixed: nn.Module = nn.Linear(width, 3 * width)
        self.joined: nn.Module = nn.Linear(width, width)
        self.after = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.before(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class Model(nn.Module):
    """Six blocks between an embedding and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(6)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.positions(torch.arange(text.shape[1]))
        predicted: Tensor = self.head(self.norm(self.blocks(x)))
        return predicted


def adapt(model: Model) -> None:
    """Freeze everything, and put trainable adapters around the attention's layers."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in ("mixed", "joined"):
            setattr(block, name, Adapted(getattr(block, name)))


def freeze_backbone(model: Model) -> None:
    """Train the head only."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)


class Training:
    """Steps of AdamW over Python's own sources."""

    def __init__(self, model: Model, learning_rate: float) -> None:
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=learning_rate)
        self._text = _sources()

    def step(self) -> float:
        """One step; the loss."""
        starts = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,)).tolist()
        windows = torch.stack([self._text[at : at + CONTEXT + 1] for at in starts]).long()
        # Processors without instructions for bf16 would take minutes: only what is kept has it.
        weights = {name: weight.float() for name, weight in self.model.named_parameters()}
        predicted = functional_call(self.model, weights, (windows[:, :-1],))
        loss = functional.cross_entropy(predicted.flatten(0, 1), windows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)


def _sources() -> Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
