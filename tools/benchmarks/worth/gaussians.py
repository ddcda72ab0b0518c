"""Classifies a mixture of Gaussians, as in asynchronous DiLoCo's notebook (Liu et al., 2401.09135).

The centres are as in the notebook. Here there are 128 dimensions instead of 512, a deviation of 0.25 instead of 0.5,
and 256 hidden units instead of 65,000. Each rank draws new examples all the time, so that it cannot memorise them.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from worth.learning import Judge, Learner, ModelJudge, ModelLearner


class Gaussians:
    """Mixture of 32 Gaussians, eight for each of four classes, with centres of length 1 and a deviation of 0.25."""

    CLUSTERS: Final = 32
    CLASSES: Final = 4
    PER_CLASS: Final = CLUSTERS // CLASSES
    DIMENSIONS: Final = 128
    DEVIATION: Final = 0.25
    LR: Final = 1.6e-2
    BATCH_COUNT: Final = 32

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(self.CLUSTERS, self.DIMENSIONS, generator=generator)
        self._centres = functional.normalize(centres)
        self._held_out = self.draw(512, torch.Generator().manual_seed(100_000 + seed))
        self._test = self.draw(1024, torch.Generator().manual_seed(200_000 + seed))

    def draw(self, count: int, generator: torch.Generator, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return examples and their classes. ``shares`` are the classes' shares, equal by default."""
        if shares is None:
            clusters = torch.randint(self.CLUSTERS, (count,), generator=generator)
        else:
            classes = torch.multinomial(shares, count, replacement=True, generator=generator)
            clusters = classes * self.PER_CLASS + torch.randint(self.PER_CLASS, (count,), generator=generator)
        noise = torch.randn(count, self.DIMENSIONS, generator=generator)
        return self._centres[clusters] + self.DEVIATION * noise, clusters // self.PER_CLASS

    def shares(self, rank: int, rank_count: int, shards: str) -> Tensor | None:
        """Return the shares of the classes in a rank's data: the ranks' parts of each class, drawn with the seed."""
        if shards == "iid":
            return None
        if shards == "one class":
            return functional.one_hot(torch.tensor(rank % self.CLASSES), self.CLASSES).float()
        concentration = float(shards.removeprefix("dirichlet "))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(300_000 + self._seed)
            parts = torch.distributions.Dirichlet(torch.full((rank_count,), concentration)).sample((self.CLASSES,))
        return (parts[:, rank] + 1e-6) / (parts[:, rank] + 1e-6).sum()

    def model(self) -> nn.Module:
        """Return a model with the first weights of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return nn.Sequential(nn.Linear(self.DIMENSIONS, 256), nn.ReLU(), nn.Linear(256, self.CLASSES))

    def learner(self, rank: int, shards: str, lr_factor: float) -> Learner:
        """Return a rank's learner."""
        model, shares = self.model(), self.shares(rank, 4, shards)
        generator = torch.Generator().manual_seed(1000 * (self._seed + 1) + rank)
        return ModelLearner(
            model,
            self.LR,
            lr_factor,
            lambda: _loss(model, self.draw(self.BATCH_COUNT, generator, shares)),
            lambda: _loss(model, self._held_out),
        )

    def judge(self) -> Judge:
        """Return the judge of the seed's models."""
        return ModelJudge(
            self.model(), lambda model: _loss(model, self._held_out), lambda model: _loss(model, self._test)
        )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@functools.lru_cache(maxsize=8)
def gaussians(seed: int) -> Gaussians:
    """Return the mixture of a seed."""
    return Gaussians(seed)
