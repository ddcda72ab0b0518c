"""Defines a mutant: an edit of one file that puts a defect back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AVERAGING: Final = "scenarios:averaging"


@dataclass(frozen=True, slots=True)
class Mutant:
    """An edit of one file that puts a defect back.

    Attributes:
        name: Name on the command line.
        defect: Number of the defect in docs/architecture.md, section 11, or a few words for a defect not listed there.
        what: One line that describes the defect.
        file: Path from the top of the repository.
        old: Text to replace; occurs exactly once in the file.
        new: Replacement.
        scenario: Scenario that must find the defect, as ``module:function``.
    """

    name: str
    defect: int | str
    what: str
    file: str
    old: str
    new: str
    scenario: str = AVERAGING
