"""How the ranks of a job ended, read from the lines that the job prints."""

from __future__ import annotations

import re


def failed_ranks(said: str) -> list[int]:
    """Return the ranks whose own failure is printed, in the order of their lines."""
    return [int(rank) for rank in re.findall(r"^asyncdist: rank (\d+) failed:$", said, re.MULTILINE)]


def stopped_by(said: str, failed: int, error: str = "") -> list[int]:
    """Return the ranks that report that they stopped because rank ``failed`` failed, sorted.

    Args:
        said: Standard error of the job, or some lines of it.
        failed: The rank that failed.
        error: The beginning of its error, such as ``"ValueError: boom"``.
    """
    pattern = rf"\brank (\d+) stopped: rank {failed} failed: {re.escape(error)}"
    return sorted(int(rank) for rank in re.findall(pattern, said))


def lost_ranks(said: str) -> list[int]:
    """Return the ranks that are reported as lost, in the order of the lines."""
    return [int(rank) for rank in re.findall(r"\brank (\d+) is lost\b", said)]
