"""Formats ranks, durations, sizes, counts and tables for reports, errors and log lines."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def ranks_in_words(ranks: Collection[int], *, span_count_max: int | None = None) -> str:
    """Return ranks as text, such as ``"ranks 0, 1, 5-9"``. After ``span_count_max`` ranges, count the other ranks."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [", ".join(map(str, span)) if len(span) < 3 else f"{span[0]}-{span[-1]}" for span in spans]
    more = sum(map(len, spans[span_count_max:])) if span_count_max is not None else 0
    rest = f" and {more} more" if more else ""
    return f"rank{'s'[: len(ranks) != 1]} {', '.join(texts[:span_count_max])}{rest}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``"1 rank"`` or ``"2,000 ranks"``."""
    return f"{count:,} {noun}{'s'[: count != 1]}"


def has_or_have(things: Collection[object]) -> str:
    """Return ``"has"`` if there is one thing, and otherwise ``"have"``."""
    return "has" if len(things) == 1 else "have"


def ordinal(number: int) -> str:
    """Return a number as an English ordinal, such as ``"1st"``, ``"2nd"``, ``"3rd"`` or ``"11th"``."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def seconds_in_words(seconds: float) -> str:
    """Return a duration in a suitable unit, such as ``"12 min"``, ``"61 s"``, ``"1.2 s"`` or ``"12.5 ms"``."""
    # The limits are those of the rounded numbers, because 999.7 with three digits is "1e+03".
    if seconds >= 599.5:
        return f"{seconds / 60:.0f} min"
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    if seconds >= 0.9995 or not seconds:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} us"


def size_in_words(nbytes: float) -> str:
    """Return a number of bytes in a suitable unit, such as ``"2.5 MiB"``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def aligned(rows: Sequence[Sequence[object]], *, right: Collection[int] = ()) -> str:
    """Return a table with left-aligned columns, or right-aligned columns for the indices in ``right``."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
