"""A language model of characters, trained on Python's manual, which is part of Python (``pydoc_data.topics``)."""

from __future__ import annotations

import functools
import math
from pydoc_data.topics import topics
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from worth.learning import Judge, Learner, ModelJudge, ModelLearner

CONTEXT: Final = 64
WIDTH: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
BATCH_COUNT: Final = 4
LR: Final = 4e-3
#: Length in characters of a part of the text. One part in 16 is held out, and one is the test set.
_PART: Final = 2048


class Block(nn.Module):
    """A layer of a transformer, with its normalization first."""

    def __init__(self) -> None:
        super().__init__()
        self.normal, self.normal_inside = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, states: Tensor) -> Tensor:
        """Return the states after causal attention and a network for each position."""
        batch, length, _ = states.shape
        split = self.queries(self.normal(states)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        states = states + self.mix(found.transpose(1, 2).reshape(batch, length, WIDTH))
        after: Tensor = states + self.inside(self.normal_inside(states))
        return after


class Transformer(nn.Module):
    """A transformer of two layers, which predicts the next character."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.normal, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols)
        for table in (self.symbols, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of each next character."""
        found: Tensor = self.head(self.normal(self.blocks(self.symbols(text) + self.places.weight[: text.shape[1]])))
        return found


@functools.cache
def _texts() -> tuple[int, list[Tensor]]:
    """Return the number of symbols, and the text for training, for choosing and for the test."""
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {symbol: number for number, symbol in enumerate(alphabet)}
    whole = torch.tensor([numbers[symbol] for symbol in text])
    parts = whole[: len(whole) // _PART * _PART].view(-1, _PART)
    kind = torch.arange(len(parts)) % 16
    return len(alphabet), [parts[chosen].flatten() for chosen in (kind < 14, kind == 14, kind == 15)]


def _bits(model: nn.Module, text: Tensor) -> Tensor:
    """Return the bits per character of windows of the text."""
    scores = model(text[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


def _windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    begins = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    return text[begins + torch.arange(CONTEXT + 1)]


def _model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(_texts()[0])


@functools.lru_cache(maxsize=8)
def _fixed(seed: int, kind: int, count: int) -> Tensor:
    """Return windows of the text that is held out (1) or for the test (2)."""
    return _windows(_texts()[1][kind], count, torch.Generator().manual_seed(10 * seed + kind))


def learner(seed: int, rank: int, shards: str, lr_factor: float) -> Learner:
    """Return a rank's learner; all ranks draw windows from the whole text for training."""
    model, text = _model(seed), _texts()[1][0]
    generator = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
    return ModelLearner(
        model,
        LR,
        lr_factor,
        lambda: _bits(model, _windows(text, BATCH_COUNT, generator)),
        lambda: _bits(model, _fixed(seed, 1, 32)),
    )


def judge(seed: int) -> Judge:
    """Return the judge of the seed's models."""
    return ModelJudge(
        _model(seed), lambda model: _bits(model, _fixed(seed, 1, 32)), lambda model: _bits(model, _fixed(seed, 2, 128))
    )
