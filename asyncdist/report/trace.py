"""A recording as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's Trace Event Format, in JSON. Each rank is a process with four tracks: its steps, what it does in
rounds, its messages, and its waits. An arrow leads from each message's sending to its receiving. Traces that torch's
profiler has exported can be added; they are laid over the ranks by the clock of the day that both name.

Perfetto knows the two ends of an arrow by a hexadecimal number, and leaves out an arrow with another name.
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from asyncdist.recording.events import KINDS, Event
from asyncdist.recording.reader import Recording
from asyncdist.report.clocks import Clocks

Entry: TypeAlias = dict[str, Any]

STEPS, ROUNDS, MESSAGES, WAITS = range(4)
TRACKS: Final = ("steps", "rounds", "messages", "waits")
#: Events that are points of the rounds' track.
_POINTS: Final = frozenset(
    {
        "applied",
        "abandoned",
        "decided",
        "frozen",
        "ended",
        "coordinator",
        "closed",
        "lost",
        "returned",
        "interrupted",
        "over",
        "policy",
    }
)
#: How long a message is drawn, in microseconds: arrows need something to end at.
_MESSAGE_US: Final = 1.0
#: Processes of profilers are numbered from here on, so many for each file.
_PROFILER_PID: Final = 1_000_000
#: Arrows of one line of messages, and those of one profile, are numbered within so many; the profiles' come last.
_ARROWS: Final = 1 << 32
_PROFILER_ARROWS: Final = 1 << 62


class TraceError(Exception):
    """A trace cannot be made: the message is one line for the user."""


def write_trace(recording: Recording, path: Path, profiles: Sequence[Path] = ()) -> int:
    """Write the trace; return the number of its entries.

    Args:
        recording: of a job.
        path: of the file; compressed where it ends with ``.gz``, which Perfetto reads as well.
        profiles: files that ``torch.profiler.profile.export_chrome_trace`` has written.

    Raises:
        TraceError: a profile cannot be read.
        OSError: the file cannot be written.
    """
    extra = [_profile(recording, file, number) for number, file in enumerate(profiles)]
    count = 0
    with gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for entries in (_entries(recording), *extra):
            for entry in entries:
                file.write(("," if count else "") + "\n" + _as_json(entry))
                count += 1
        file.write("\n]}\n")
    return count


def _as_json(entry: Entry) -> str:
    """Return an entry as JSON, which has no NaN and no infinity: they become texts."""
    try:
        return json.dumps(entry, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(entry), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _entries(recording: Recording) -> Iterator[Entry]:
    clocks = Clocks(recording)
    arrows = _Arrows(recording)
    for each in recording.ranks:
        pid = each.rank + recording.size * each.incarnation
        host = each.header["hostname"]
        again = f", started again ({each.incarnation})" if each.incarnation else ""
        yield _meta("process_name", pid, 0, f"rank {each.rank} on {host}{again}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": each.rank}}
        for track, name in enumerate(TRACKS):
            yield _meta("thread_name", pid, track, name)
        offset = clocks.offset(each)
        role: tuple[float, int, str] | None = None
        at_us = 0.0
        for event in each.events():
            at_us = 1e6 * (event.time_s + offset)
            if event.kind == "role":
                if role is not None:
                    yield _role(pid, role, at_us)
                state, number = str(event.get("state")), int(event.get("round"))
                role = None if state in ("idle", "out") else (at_us, number, state)
            else:
                yield from _entries_of(pid, each.rank, event, at_us, arrows)
        if role is not None:
            yield _role(pid, role, at_us)


class _Arrows:
    """Numbers the messages: the k-th one sent on a line is the k-th one received there.

    Args:
        recording: of the job. What a rank that was started again has sent and received is not told apart from what the
            process before it has, so these messages have no arrows.
    """

    def __init__(self, recording: Recording) -> None:
        ranks = [each.rank for each in recording.ranks]
        self._restarted = {rank for rank in ranks if ranks.count(rank) > 1} if len(set(ranks)) < len(ranks) else set()
        self._lines: dict[tuple[int, int, int], int] = {}
        self._counts: defaultdict[tuple[int, str], int] = defaultdict(int)

    def number(self, phase: str, source: int, dest: int, tag: int) -> int | None:
        """Return the number of the next arrow that begins (``"s"``) or ends (``"f"``) on this line."""
        if not self._restarted.isdisjoint((source, dest)):
            return None
        line = self._lines.setdefault((source, dest, tag), len(self._lines))
        count = self._counts[line, phase]
        self._counts[line, phase] = count + 1
        return line * _ARROWS + count


def _meta(kind: str, pid: int, track: int, name: str) -> Entry:
    return {"ph": "M", "name": kind, "pid": pid, "tid": track, "args": {"name": name}}


def _role(pid: int, role: tuple[float, int, str], until_us: float) -> Entry:
    began_us, number, state = role
    return _span(pid, ROUNDS, state, began_us, until_us - began_us, {"round": number})


def _span(pid: int, track: int, name: str, began_us: float, took_us: float, facts: Entry) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": track,
        "ts": round(began_us, 3),
        "dur": round(took_us, 3),
        "args": facts,
    }


def _entries_of(pid: int, rank: int, event: Event, at_us: float, arrows: _Arrows) -> Iterator[Entry]:
    facts = dict(zip(KINDS[event.kind], event.fields, strict=False))
    match event.kind:
        case "step":
            took_us = 1e6 * float(event.get("seconds"))
            yield _span(pid, STEPS, "policy.step", at_us - took_us, took_us, {"iteration": event.get("iteration")})
        case "metric":
            value, at = float(event.get("value")), {"pid": pid, "tid": STEPS, "ts": round(at_us, 3)}
            if math.isfinite(value):
                yield {"ph": "C", "name": "metric", **at, "args": {"metric": value}}
            else:  # a counter has numbers alone
                yield {"ph": "i", "s": "t", "name": f"metric {value}", **at}
        case "waited":
            took_us = 1e6 * float(event.get("seconds"))
            yield _span(pid, WAITS, str(event.get("what")), at_us - took_us, took_us, {})
        case "sent":
            yield from _message(pid, "s", rank, int(event.get("dest")), event, at_us, arrows)
        case "received":
            yield from _message(pid, "f", int(event.get("source")), rank, event, at_us, arrows)
        case kind if kind in _POINTS:
            ts = round(at_us, 3)
            yield {"ph": "i", "s": "t", "name": kind, "pid": pid, "tid": ROUNDS, "ts": ts, "args": facts}


def _message(
    pid: int, phase: str, source: int, dest: int, event: Event, at_us: float, arrows: _Arrows
) -> Iterator[Entry]:
    """Yield a message's end, and that of its arrow."""
    tag = int(event.get("tag"))
    words = f"to {dest}" if phase == "s" else f"from {source}"
    yield _span(pid, MESSAGES, f"{words}, tag {tag}", at_us, _MESSAGE_US, {"tag": tag, "nbytes": event.get("nbytes")})
    number = arrows.number(phase, source, dest, tag)
    if number is not None:
        arrow = {"ph": phase, "cat": "message", "name": f"tag {tag}", "id": f"{number:#x}"}
        yield {**arrow, "pid": pid, "tid": MESSAGES, "ts": round(at_us, 3), **({"bp": "e"} if phase == "f" else {})}


def _profile(recording: Recording, path: Path, number: int) -> list[Entry]:
    """Read a trace of torch's profiler, with its times since the job began and processes of its own."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            content = json.load(file)
        entries = content["traceEvents"] if isinstance(content, dict) else content
        base_s = content.get("baseTimeNanoseconds", 0) / 1e9 if isinstance(content, dict) else 0.0
        rank = content.get("distributedInfo", {}).get("rank") if isinstance(content, dict) else None
        first_us = min(float(entry["ts"]) for entry in entries if entry.get("ph") == "X")
        shift_us = 1e6 * (base_s - recording.began_at)
        if abs(first_us + shift_us) > 1e6 * 86400 * 365:  # it names no clock of the day
            shift_us = -first_us
        pids: dict[Any, int] = {}
        arrows: dict[Any, int] = {}
        found = []
        for entry in entries:
            pid = pids.setdefault(entry.get("pid"), _PROFILER_PID * (number + 1) + len(pids))
            moved = {**entry, "pid": pid}
            if "ts" in entry:
                moved["ts"] = float(entry["ts"]) + shift_us
            if entry.get("ph") in ("s", "t", "f"):
                arrow = arrows.setdefault(entry.get("id"), len(arrows))
                moved["id"] = f"{_PROFILER_ARROWS + number * _ARROWS + arrow:#x}"
            if entry.get("name") == "process_name" and rank is not None:
                moved["args"] = {"name": f"rank {rank}, torch: {entry.get('args', {}).get('name', '')}"}
            found.append(moved)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"{path} is no trace of torch's profiler: {type(error).__name__} {error}") from error
    return found
