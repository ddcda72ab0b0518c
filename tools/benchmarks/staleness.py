"""Measures ten rules of asynchronous DiLoCo on ranks of different speeds whose shards of the data differ.

Four ranks learn to classify a mixture of Gaussians into four classes, with AdamW and ``AVERAGE_EVERY`` steps between
contributions. Two things vary:

- the speed: a step of the slowest rank takes 1, 2, 4, 8 or 16 times as long as a step of the fastest rank. The other
  two ranks lie between them, with equal ratios between neighbours;
- the shards: the classes of a rank's examples have equal shares on all ranks, or shares from a Dirichlet distribution,
  or each rank has one class. In each case all ranks together have equally many examples of each class.

The ranks are simulated. The training is real torch; the virtual time of a step is constant, and messages take almost no
time. The figures therefore do not depend on the machine's speed, and equal seeds give equal figures. The loss of the
newest anchor that a rank has received is measured on other examples with equal shares of the classes. It is averaged
over ten moments in the last tenth of the time, because with different shards each contribution moves the anchor towards
one rank's classes.

Each rule is tried with three outer learning rates in each cell, on a separate seed. The best rate is then measured on
the other seeds. The synchronous rules have the same budget.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import simulations
import torch
from async_diloco import Gaussians
from harness import Results, Row
from torch import Tensor, nn
from torch.nn import functional

import asyncdist as ad
from asyncdist.simulation import Compute
from protocols import CGAD, AsyncDiLoCoPolicy, DelayedNesterov, DiLoCoPolicy, HeLoCo, StalenessWeight

#: No ranks to launch: this benchmark simulates them.
RANKS: Final = ()
RANK_COUNT: Final = Gaussians.CLASSES
AVERAGE_EVERY: Final = 8
BATCH_COUNT: Final = 16
#: Standard deviation of the Gaussians, whose centres have the length 1.
DEVIATION: Final = 0.25
HELD_OUT_COUNT: Final = 1024
INNER_LR: Final = 1e-2
#: Number of batches that a rank draws at once.
DRAWN_COUNT: Final = 64
#: Times at which the loss is measured, as shares of the training time.
MARKS: Final = tuple(0.91 + 0.01 * number for number in range(10))
#: The seed on which outer learning rates are compared; the other seeds are 1, 2, ...
TUNING_SEED: Final = 0
#: Loss that stands for a diverged run: four times the loss of a model that gives each class the same probability.
WORST: Final = 4 * math.log(Gaussians.CLASSES)


@dataclass(frozen=True, slots=True)
class Settings:
    """Amount of work to simulate.

    Attributes:
        train_s: Virtual seconds of training; a step of the fastest rank takes 1 s.
        seeds: Number of measured seeds, which change the task, the first weights, the shards and the examples.
        ratios: Speed ratios of the fastest and the slowest rank.
        shards: Names of the divisions of the data among the ranks.
        width: Length of an example and number of hidden units.
        tries_all: Whether all outer learning rates of a rule are tried, or only the middle one.
    """

    train_s: float
    seeds: int
    ratios: tuple[int, ...]
    shards: tuple[str, ...]
    width: int = 32
    tries_all: bool = True


# -- the rules --------------------------------------------------------------------------------------------------------

Policy = AbstractAsyncContextManager[Any]
NESTEROV: Final = functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)
DELAYED: Final = functools.partial(DelayedNesterov, momentum=0.9, delay=RANK_COUNT)
#: Adam whose second moment covers ten times as many steps as DiLoCo's momentum.
ADAM: Final = functools.partial(torch.optim.Adam, betas=(0.9, 0.99))


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to train.

    Attributes:
        policy: The policy's class; None for a rule that the benchmark implements itself.
        outer: Function that makes the outer optimizer for a learning rate.
        lrs: Outer learning rates that are tried.
        options: Further options of the policy.
    """

    policy: Callable[..., Policy] | None
    outer: Callable[..., torch.optim.Optimizer] | None
    lrs: tuple[float, ...]
    options: dict[str, Any]


def _async(outer: Callable[..., torch.optim.Optimizer], lrs: tuple[float, ...], **options: Any) -> Rule:
    return Rule(AsyncDiLoCoPolicy, outer, lrs, options)


#: Rules in the chart.
RULES: Final = {
    "SGD": _async(torch.optim.SGD, (0.1, 0.3, 1.0)),
    "SGD, staleness weight": _async(torch.optim.SGD, (0.2, 0.6, 2.0), correct=StalenessWeight()),
    "Nesterov": _async(NESTEROV, (0.01, 0.03, 0.1)),
    "Nesterov, staleness weight": _async(NESTEROV, (0.02, 0.06, 0.2), correct=StalenessWeight()),
    "Nesterov, HeLoCo": _async(NESTEROV, (0.01, 0.03, 0.1), correct=HeLoCo()),
    "delayed Nesterov": _async(DELAYED, (0.1, 0.3, 0.9)),
    "delayed Nesterov, dynamic steps": _async(DELAYED, (0.1, 0.3, 0.9), dynamic_steps=True),
    "Adam": _async(ADAM, (0.002, 0.006, 0.02)),
    "Adam, CGAD": _async(ADAM, (0.002, 0.006, 0.02), correct=CGAD(decay=0.1, cutoff=32)),
    "Decoupled, grace": _async(NESTEROV, (0.01, 0.03, 0.1), grace_steps=2, weights="rate", merge="radial"),
}
#: Rules under which all ranks wait for the slowest rank. Each cell is compared with the best of them.
SYNCHRONOUS: Final = {
    "DiLoCo": Rule(DiLoCoPolicy, NESTEROV, (0.2, 0.6, 1.8), {}),
    "DiLoCo without momentum": Rule(DiLoCoPolicy, torch.optim.SGD, (0.3, 1.0, 3.0), {}),
}
#: Further rules to compare with: all gradients averaged in each step, without any time for messages; rank 0 alone; and
#: the default rule of ``AsyncDiLoCoPolicy``, with its own learning rate.
OTHERS: Final = {
    "DDP": Rule(None, None, (1.0,), {}),
    "fastest rank alone": Rule(None, None, (1.0,), {}),
    "default, not tuned": _async(torch.optim.SGD, (1.0,), correct=StalenessWeight(power=1.0, first_round=True)),
}
ALL: Final = {**RULES, **SYNCHRONOUS, **OTHERS}

#: Concentration of the Dirichlet distribution of each division of the data.
SHARDS: Final = {"iid": math.inf, "Dirichlet 1": 1.0, "Dirichlet 0.3": 0.3, "Dirichlet 0.1": 0.1, "one class": 0.0}
FULL: Final = Settings(480.0, 3, (1, 2, 4, 8, 16), tuple(SHARDS))
QUICK: Final = Settings(96.0, 1, (4,), ("iid", "one class"), tries_all=False)


# -- the task ---------------------------------------------------------------------------------------------------------


def class_shares(shards: str, seed: int) -> Tensor:
    """Return the shares of the classes on each rank: float64 of shape (ranks, classes); rows and columns sum to 1."""
    concentration = SHARDS[shards]
    if not concentration:
        return torch.eye(RANK_COUNT, dtype=torch.float64)
    if math.isinf(concentration):
        return torch.full((RANK_COUNT, RANK_COUNT), 1 / RANK_COUNT, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7000 + seed)
        shape = torch.full((RANK_COUNT, RANK_COUNT), concentration, dtype=torch.float64)
        shares = torch.distributions.Gamma(shape, 1.0).sample() + 1e-6
    for _ in range(1000):  # Sinkhorn: the same total for each class, and for each rank
        shares = shares / shares.sum(0, keepdim=True)
        shares = shares / shares.sum(1, keepdim=True)
    return shares


class Shard:
    """Draws a rank's examples, without end.

    Args:
        shares: Shares of the classes: float64 of shape (classes,).
        seed: Seed of the drawn examples.
    """

    def __init__(self, task: Gaussians, shares: Tensor, seed: int) -> None:
        self._task = task
        self._shares = shares
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[tuple[Tensor, Tensor]] = []

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of examples and their classes."""
        if not self._drawn:
            count = DRAWN_COUNT * BATCH_COUNT
            classes = torch.multinomial(self._shares, count, replacement=True, generator=self._generator)
            examples, classes = self._task.draw_of(classes, self._generator)
            self._drawn = list(zip(examples.chunk(DRAWN_COUNT), classes.chunk(DRAWN_COUNT), strict=True))
        return self._drawn.pop()


class Learner:
    """Trains a model with AdamW."""

    def __init__(self, seed: int, width: int) -> None:
        self.task = Gaussians(seed, width, DEVIATION)
        held_out = torch.Generator().manual_seed(500 + seed)
        self._held_out = self.task.draw(HELD_OUT_COUNT, held_out)
        self._rows = torch.arange(RANK_COUNT * BATCH_COUNT)
        torch.manual_seed(seed)  # equal first weights on all ranks
        self._first, self._second = nn.Linear(width, width), nn.Linear(width, Gaussians.CLASSES)
        self.model = nn.Sequential(self._first, nn.ReLU(), self._second)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=INNER_LR, fused=True)

    @torch.no_grad()
    def step(self, examples: Tensor, classes: Tensor) -> None:
        """Make one step of training.

        The gradients are computed without autograd, which would take longer than everything else in so small a model.
        """
        first, second = self._first, self._second
        hidden = torch.addmm(first.bias, examples, first.weight.T).relu_()
        change = torch.softmax(torch.addmm(second.bias, hidden, second.weight.T), 1)
        change[self._rows[: len(classes)], classes] -= 1.0
        change /= len(classes)
        of_hidden = (change @ second.weight).mul_(hidden > 0.0)
        second.weight.grad, second.bias.grad = change.T @ hidden, change.sum(0)
        first.weight.grad, first.bias.grad = of_hidden.T @ examples, of_hidden.sum(0)
        self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on the held-out examples; at most ``WORST``."""
        examples, classes = self._held_out
        loss = functional.cross_entropy(self.model(examples), classes).item()
        return min(loss, WORST) if math.isfinite(loss) else WORST


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Identifies one simulated training run.

    Attributes:
        every: Number of steps between contributions.
    """

    rule: str
    ratio: int
    shards: str
    lr: float
    seed: int
    train_s: float
    width: int
    rank_count: int = RANK_COUNT
    every: int = AVERAGE_EVERY

    def step_s(self, rank: int) -> float:
        """Return the seconds of a rank's step."""
        return float(self.ratio ** (rank / (self.rank_count - 1)))


def _shard(task: Gaussians, run: Run, rank: int) -> Shard:
    return Shard(task, class_shares(run.shards, run.seed)[rank % RANK_COUNT], 1000 * (run.seed + 1) + rank)


@dataclass(slots=True)
class Board:
    """Collects the results of the ranks of a run.

    Attributes:
        anchors: Share of the training time that had passed, version and loss of each anchor that a rank received.
        staleness: Staleness in versions of each contribution.
    """

    anchors: list[tuple[float, int, float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def loss(self) -> float:
        """Return the mean loss of the newest anchor, over the moments ``MARKS``."""
        found = []
        for mark in MARKS:
            known = [(version, loss) for passed, version, loss in self.anchors if passed <= mark]
            found.append(max(known)[1] if known else math.log(Gaussians.CLASSES))
        return statistics.mean(found)


async def _train(world: ad.World, run: Run, board: Board) -> None:
    """Train one rank until the virtual time is over."""
    rule = ALL[run.rule]
    assert rule.policy is not None and rule.outer is not None
    learner = Learner(run.seed, run.width)
    shard = _shard(learner.task, run, world.rank)
    made = rule.policy(
        learner.model,
        learner.optimizer,
        average_every=run.every,
        outer_optimizer=functools.partial(rule.outer, lr=run.lr),
        **rule.options,
    )
    async with AsyncExitStack() as stack:
        policy = await stack.enter_async_context(made)
        begins_at_s = world.time()
        while world.time() - begins_at_s < run.train_s:
            learner.step(*shard.draw())
            try:
                info = await policy.step()
            except ad.ClosedError:  # another rank's time is over, so no further mean of all ranks is possible
                break
            if not info:
                continue
            passed = (world.time() - begins_at_s) / run.train_s
            board.staleness.append(max(0, info.staleness_versions))
            if passed >= MARKS[0] / 2:  # under the synchronous rules, the last anchor before a moment may be old
                async with policy.anchor_weights():
                    board.anchors.append((passed, info.round, learner.loss()))


def _train_without_policy(run: Run) -> float:
    """Train with the mean gradients of all ranks in each step, or rank 0 alone."""
    learner = Learner(run.seed, run.width)
    rank_count, step_s = (RANK_COUNT, run.step_s(RANK_COUNT - 1)) if run.rule == "DDP" else (1, run.step_s(0))
    shards = [_shard(learner.task, run, rank) for rank in range(rank_count)]
    losses, count = list[float](), int(run.train_s / step_s)
    for number in range(count):
        examples, classes = zip(*(shard.draw() for shard in shards), strict=True)
        learner.step(torch.cat(examples), torch.cat(classes))
        if (number + 1) / count >= MARKS[min(len(losses), len(MARKS) - 1)]:
            losses.append(learner.loss())
    return statistics.mean(losses)


def simulate(run: Run) -> Results:
    """Simulate a run, and return its loss and the largest staleness of a contribution in versions."""
    if ALL[run.rule].policy is None:
        return {"loss": _train_without_policy(run), "staleness": 0}
    factors = {rank: run.step_s(rank) for rank in range(run.rank_count)}
    compute = Compute(step_s=1.0, factors=factors, overrun_probability=0.0)
    board = Board()
    ad.simulate(_train, run, board, ranks=run.rank_count, seed=run.seed, compute=compute).value()
    return {"loss": board.loss(), "staleness": max(board.staleness, default=0)}


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> Results:
    """Return the chosen learning rate and each seed's figures, keyed by shards, speed ratio and rule."""
    cells = [(rule, ratio, shards) for shards in settings.shards for ratio in settings.ratios for rule in ALL]

    def run(cell: tuple[str, int, str], lr: float, seed: int) -> Run:
        return Run(*cell, lr, seed, settings.train_s, settings.width)

    tuned_cells = [cell for cell in cells if len(ALL[cell[0]].lrs) > 1 and settings.tries_all]
    tuning = [run(cell, lr, TUNING_SEED) for cell in tuned_cells for lr in ALL[cell[0]].lrs]
    results: Results = {shards: {str(ratio): {} for ratio in settings.ratios} for shards in settings.shards}
    tuned: dict[tuple[str, int, str], dict[float, float]] = {cell: {} for cell in cells}
    for each, figures in simulations.simulated(simulate, tuning, "tuning"):
        tuned[each.rule, each.ratio, each.shards][each.lr] = figures["loss"]
    chosen = {
        cell: min(of_lr, key=of_lr.__getitem__, default=ALL[cell[0]].lrs[len(ALL[cell[0]].lrs) // 2])
        for cell, of_lr in tuned.items()
    }
    runs = [run(cell, chosen[cell], seed) for cell in cells for seed in range(1, 1 + settings.seeds)]
    for each, figures in simulations.simulated(simulate, runs):
        found = results[each.shards][str(each.ratio)].setdefault(each.rule, {"lr": each.lr, "runs": []})
        found["runs"].append(figures)
    for (rule, ratio, shards), of_lr in tuned.items():
        results[shards][str(ratio)][rule]["tuning"] = {str(lr): loss for lr, loss in of_lr.items()}
    return results


def median_loss(found: Results) -> float:
    """Return the median loss of a rule's runs in one cell."""
    return float(statistics.median(run["loss"] for run in found["runs"]))


def reference_loss(of_rule: Results) -> float:
    """Return the median loss of the best synchronous rule of a cell."""
    return min(median_loss(of_rule[name]) for name in SYNCHRONOUS)


def relative_loss(of_rule: Results, rule: str) -> float:
    """Return a rule's median loss in a cell, divided by the loss of the best synchronous rule."""
    return median_loss(of_rule[rule]) / reference_loss(of_rule)


def rows(results: Results) -> list[Row]:
    """Return the table's rows: the three best rules of each cell, and the rules to compare with."""
    return [
        Row(
            f"{shards}, slowest rank {ratio} times slower",
            "; ".join(_shown(of_rule, name) for name in _from_best(of_rule, RULES)[:3]),
            "; ".join(_shown(of_rule, name) for name in (*SYNCHRONOUS, *OTHERS)),
        )
        for shards, of_ratio in results.items()
        for ratio, of_rule in of_ratio.items()
    ]


def _from_best(of_rule: Results, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: median_loss(of_rule[name]))


def _shown(of_rule: Results, name: str) -> str:
    losses = sorted(run["loss"] for run in of_rule[name]["runs"])
    lr = f", lr {of_rule[name]['lr']:g}" if len(ALL[name].lrs) > 1 else ""
    return f"{name} {median_loss(of_rule[name]):.3f} ({losses[0]:.3f} to {losses[-1]:.3f}{lr})"


def draw(results: Results, path: Path) -> None:
    """Write the chart, in the format that the path's ending names."""
    import matplotlib  # an optional package, needed only here

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shards = list(results)
    ratios = sorted({int(ratio) for of_ratio in results.values() for ratio in of_ratio})
    figure, panels = plt.subplots(2, 5, figsize=(13.5, 6.4), dpi=150, sharex=True, sharey=True, layout="constrained")
    for axes, name in zip(panels.flat, RULES, strict=True):
        logarithms = [[math.nan] * len(ratios) for _ in shards]  # cells without results stay blank
        for row, of_ratio in enumerate(results.values()):
            for ratio, of_rule in of_ratio.items():
                column = ratios.index(int(ratio))
                logarithms[row][column] = math.log2(relative_loss(of_rule, name))
                _draw_cell(axes, row, column, of_rule, name)
        axes.imshow(logarithms, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xticks(range(len(ratios)), [f"{ratio}x" for ratio in ratios])
        axes.set_yticks(range(len(shards)), shards)
        axes.tick_params(length=0)
    figure.supxlabel("slowest rank's step / fastest rank's step", fontsize=10)
    figure.supylabel("shards of the ranks", fontsize=10)
    bar = figure.colorbar(panels[0, 0].images[0], ax=panels, ticks=[-1, -0.5, 0, 0.5, 1], shrink=0.8, pad=0.01)
    bar.set_ticklabels(["0.5 or less", "0.71", "1", "1.41", "2 or more"])
    bar.set_label("loss / loss of the best synchronous rule (box: best of the ten)", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def _draw_cell(axes: Any, row: int, column: int, of_rule: Results, name: str) -> None:
    """Write a rule's relative loss into its cell, and draw a box if this loss is the smallest of the ten."""
    from matplotlib.patches import Rectangle

    value = relative_loss(of_rule, name)
    is_best = _from_best(of_rule, RULES)[0] == name
    colour = "white" if abs(math.log2(value)) > 0.6 else "black"
    weight = "bold" if is_best else "normal"
    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9, fontweight=weight, color=colour)
    if is_best:
        axes.add_patch(Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, linewidth=1.6))


if __name__ == "__main__":
    simulations.main(measure, full=FULL, quick=QUICK)
