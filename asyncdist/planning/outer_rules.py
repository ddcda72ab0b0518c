"""Recommends the outer rule of DiLoCo for ranks of different speeds, from the figures of ``./tools/bench staleness``.

Synchronous DiLoCo is recommended unless the best tuned asynchronous rule is better than the best synchronous rule on
each seed. Then the asynchronous default rule is recommended if it is also better untuned, and all ranks have the same
kind of data. Otherwise, SGD without momentum and staleness weight is recommended if its loss is within 3 % of the best
rule's, or else the best tuned rule. Between two measured speed ratios, both measurements are printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Measured:
    """Stores the measured loss of one outer rule with four ranks, for one kind of data and one ratio of speeds.

    Attributes:
        rule: Name of the recommended asynchronous rule.
        lr: Outer learning rate of the rule, the best of three, or None for the default rule, which is not tuned.
        relative_loss: Median loss of the rule over three seeds, divided by the best synchronous rule's loss.
        wins: Whether this rule, or the tuned rule ``best``, has a smaller loss than the best synchronous rule on each
            seed.
        best: Tuned rule with the smallest loss, and its relative loss, or None if it is the recommended rule.
    """

    rule: str
    lr: float | None
    relative_loss: float
    wins: bool
    best: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class DataDivision:
    """Describes how the ranks' data differ.

    Attributes:
        cells: Measurements, keyed by the ratio of the slowest rank's step time to the fastest rank's.
    """

    described: str
    row: str
    cells: Mapping[int, Measured]


DEFAULT: Final = "the default rule"
#: Divisions of the data, keyed by their names on the command line.
SHARDS: Final = {
    "iid": DataDivision(
        "all ranks have the same kind of data",
        "iid",
        {
            1: Measured(DEFAULT, None, 1.14, False, best=("SGD, staleness weight, lr=0.6", 1.09)),
            4: Measured(DEFAULT, None, 0.84, True, best=("SGD, staleness weight, lr=2", 0.77)),
            16: Measured(DEFAULT, None, 0.58, True, best=("SGD, staleness weight, lr=2", 0.50)),
        },
    ),
    "mixed": DataDivision(
        "the ranks have different shares of each kind of data",
        "Dirichlet 0.3",
        {
            1: Measured("delayed Nesterov, dynamic steps", 0.3, 1.26, False),
            4: Measured("SGD", 1.0, 0.84, True),
            16: Measured("SGD", 1.0, 0.83, True, best=("Nesterov", 0.81)),
        },
    ),
    "separate": DataDivision(
        "each rank has a different kind of data",
        "one class",
        {
            1: Measured("Decoupled, grace", 0.03, 1.30, False),
            4: Measured("Adam", 0.002, 1.47, False),
            16: Measured("Adam", 0.002, 1.39, False),
        },
    ),
}


def lines(slowest: float, shards: str, every: int) -> Iterator[str]:
    """Yield the printed recommendation for ranks of different speeds.

    Args:
        slowest: Ratio of the slowest rank's step time to the fastest rank's, at least 1.
        shards: Name of a division of the data, which says how the ranks' data differ.
    """
    found = SHARDS[shards]
    yield f"The slowest rank takes {slowest:g} times as long as the fastest, and {found.described}."
    yield "The policy and the utilisation above are for ranks of equal speed."
    cells = _nearest_measurements(slowest, found.cells)
    if not cells:
        measured = ", ".join(map(str, found.cells))
        yield f"There is no recommendation: this was only measured with ratios of {measured}."
        return
    winning = {cell.rule: cell for cell in cells.values() if cell.wins}
    programs = [list(_python(cell, every)) for cell in winning.values()]
    if not all(cell.wins for cell in cells.values()):
        programs.insert(0, [f"    async with DiLoCoPolicy(model, optimizer, average_every={every}) as policy:"])
    yield "For your ranks, start from this:" if len(programs) == 1 else "For your ranks, compare these:"
    for number, program in enumerate(programs):
        yield from ["or"] * (number > 0) + program
    if any(cell.lr is not None and cell.lr >= 1.0 for cell in winning.values()):
        yield "If the loss rises, try lr=0.5."
    for ratio, cell in cells.items():
        at = "with equal speeds" if ratio == 1 else f"at {ratio} times"
        yield f"Measured {at}: the loss of {_described(cell)}"
        yield f"is {cell.relative_loss:.2f} times that of the best synchronous rule."
        if cell.best:
            yield f"The loss of the best asynchronous rule, {cell.best[0]}, is {cell.best[1]:.2f} times."
    yield "This was measured with a small model on 4 ranks: docs/staleness.md."


def _nearest_measurements(slowest: float, cells: Mapping[int, Measured]) -> dict[int, Measured]:
    """Return the measurements at a speed ratio, or at the nearest ratios below and above.

    Return {} outside the measured range.
    """
    below = max((ratio for ratio in cells if ratio <= slowest), default=None)
    above = min((ratio for ratio in cells if ratio >= slowest), default=None)
    return {} if below is None or above is None else {ratio: cells[ratio] for ratio in sorted({below, above})}


def _described(cell: Measured) -> str:
    if cell.rule == DEFAULT:
        return f"{DEFAULT}, without tuning,"
    return f"{cell.rule}, the simplest rule," if cell.best else f"the best asynchronous rule, {cell.rule},"


def _python(cell: Measured, every: int) -> Iterator[str]:
    if cell.lr is None:
        yield "    from protocols import AsyncDiLoCoPolicy"
        yield ""
        yield f"    async with AsyncDiLoCoPolicy(model, optimizer, average_every={every}) as policy:"
        return
    yield "    from functools import partial"
    yield "    from protocols import AsyncDiLoCoPolicy"
    yield ""
    yield f"    outer = partial(torch.optim.SGD, lr={cell.lr:g})"
    yield "    async with AsyncDiLoCoPolicy("
    yield f"        model, optimizer, average_every={every}, outer_optimizer=outer"
    yield "    ) as policy:"
