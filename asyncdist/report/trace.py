"""Converts a recording to a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is Chrome's Trace Event Format. Each rank is a process with five tracks: steps, rounds, sent messages,
received messages, and waits. An arrow leads from each send to its receive. Traces of torch's profiler can be added,
aligned by the wall clock.

Perfetto matches the two ends of an arrow by a hexadecimal number, and ignores arrows with other identifiers.
"""

from __future__ import annotations

import bisect
import gzip
import heapq
import itertools
import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from asyncdist.errors import AsyncdistError
from asyncdist.recording.events import KINDS, Event
from asyncdist.recording.reader import RankRecording, Recording
from asyncdist.report.clock_alignment import Clocks
from asyncdist.report.whole_files import whole_file

Entry: TypeAlias = dict[str, Any]

#: Tracks, represented as threads. Their numbers begin at 1, because Perfetto replaces thread 0 with the process number.
STEPS, ROUNDS, SENT, RECEIVED, WAITS = range(1, 6)
TRACKS: Final = {STEPS: "steps", ROUNDS: "rounds", SENT: "sent", RECEIVED: "received", WAITS: "waits"}
#: Kinds of events that are drawn as points on the track of rounds.
_POINTS: Final = frozenset(
    {
        "applied",
        "contributed",
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
        "cut",
        "told",
        "policy",
        "joined",
    }
)
#: Duration with which a message is drawn, in microseconds. Each end of an arrow needs a span.
_MESSAGE_US: Final = 0.1
#: Microseconds by which a wait may appear to begin before the previous wait ended: uvloop's clock has 1 ms resolution.
_WAIT_SLACK_US: Final = 1000.0
#: Process number of the first process in the first profile, and its distance to that in the next profile.
_PROFILER_PID: Final = 1_000_000
#: Number of identifiers reserved for the arrows with one source, destination and tag, or of one profile.
_ARROWS: Final = 1 << 32
_PROFILER_ARROWS: Final = 1 << 62
#: Maximum size of a profile in bytes, uncompressed. A small compressed file could otherwise fill the memory.
_PROFILE_NBYTES_MAX: Final = 1 << 30


class TraceError(AsyncdistError):
    """Raised if a trace cannot be written. The message is one line for the user."""


def write_trace(recording: Recording, path: Path, profiles: Sequence[Path] = ()) -> int:
    """Write the trace of a recording, compressed if ``path`` ends with ``.gz``, and return the number of its entries.

    ``profiles`` are files written by ``torch.profiler.profile.export_chrome_trace``. Raise TraceError if a file cannot
    be read.
    """
    clocks = Clocks(recording)
    extra = [_profile(recording, clocks, file, number) for number, file in enumerate(profiles)]
    count = 0
    open_text = gzip.open if path.suffix == ".gz" else open
    texts = itertools.chain(map(_as_json, _entries(recording, clocks)), *extra)
    with whole_file(path) as written, open_text(written, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for text in texts:
            file.write(("," if count else "") + "\n" + text)
            count += 1
        file.write("\n]}\n")
    return count


def _as_json(entry: Entry) -> str:
    """Return an entry as JSON, with NaN and infinity as strings."""
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


def _entries(recording: Recording, clocks: Clocks) -> Iterator[Entry]:
    """Yield the entries of the recording. Receives are last, because each receive is drawn after its send."""
    arrows = _Arrows(recording)
    for each in recording.ranks:
        yield from _head(recording, each)
        tracks, sent = _Tracks(_pid(recording, each)), _Messages(_pid(recording, each), each.rank, arrows)
        at_us, offset = 0.0, clocks.offset(each)
        for event in each.events():
            at_us = 1e6 * (event.time_s + offset)
            if event.kind == "sent":
                yield from sent.begin(event, at_us)
            else:
                yield from tracks.entries(event, at_us)
        yield from tracks.rest(at_us)
    for each in recording.ranks:
        received, offset = _Messages(_pid(recording, each), each.rank, arrows), clocks.offset(each)
        for event in each.events():
            if event.kind == "received":
                yield from received.end(event, 1e6 * (event.time_s + offset))


def _pid(recording: Recording, each: RankRecording) -> int:
    return each.rank + recording.size * each.incarnation


def _head(recording: Recording, each: RankRecording) -> Iterator[Entry]:
    pid, host = _pid(recording, each), each.header.hostname
    again = f", restarted ({each.incarnation})" if each.incarnation else ""
    yield _meta("process_name", pid, STEPS, f"rank {each.rank} on {host}{again}")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": STEPS, "args": {"sort_index": each.rank}}
    for track, name in TRACKS.items():
        yield _meta("thread_name", pid, track, name)


def _meta(kind: str, pid: int, track: int, name: str) -> Entry:
    return {"ph": "M", "name": kind, "pid": pid, "tid": track, "args": {"name": name}}


class _Arrows:
    """Numbers the arrows from sends to receives. The k-th send with a key belongs to the k-th receive with that key.

    Keys are (source, destination, tag). Messages of a restarted rank have no arrows, because it is unknown to which of
    its processes they belong.
    """

    def __init__(self, recording: Recording) -> None:
        self._restarted = recording.restarted
        self._lines: dict[tuple[int, int, int], int] = {}
        self._begun_us: defaultdict[int, array[float]] = defaultdict(lambda: array("d"))
        self._ended_counts: defaultdict[int, int] = defaultdict(int)

    def begin(self, line: tuple[int, int, int], at_us: float) -> int | None:
        """Return the number of a send's arrow, or None. ``line`` is (source, destination, tag)."""
        if not self._restarted.isdisjoint(line[:2]):
            return None
        number = self._lines.setdefault(line, len(self._lines))
        self._begun_us[number].append(at_us)
        return number * _ARROWS + len(self._begun_us[number]) - 1

    def end(self, line: tuple[int, int, int]) -> tuple[int | None, float]:
        """Return the number of a receive's arrow, and the time of the send.

        The number is None if the send is not recorded, because its rank was killed or has not written it yet.
        """
        if not self._restarted.isdisjoint(line[:2]):
            return None, -math.inf
        number = self._lines.setdefault(line, len(self._lines))
        count = self._ended_counts[number]
        self._ended_counts[number] = count + 1
        begun_us = self._begun_us[number]
        return (number * _ARROWS + count, begun_us[count]) if count < len(begun_us) else (None, -math.inf)


class _Messages:
    """Converts one process's sent or received messages to entries, in chronological order and without overlaps."""

    def __init__(self, pid: int, rank: int, arrows: _Arrows) -> None:
        self._pid = pid
        self._rank = rank
        self._arrows = arrows
        self._free_us = -math.inf

    def begin(self, event: Event, at_us: float) -> Iterator[Entry]:
        """Yield the entries of a sent message and of the beginning of its arrow."""
        dest, tag, at_us = int(event.get("dest")), int(event.get("tag")), max(at_us, self._free_us)
        number = self._arrows.begin((self._rank, dest, tag), at_us)
        yield from self._entries(SENT, f"to {dest}", event, at_us, number, {"ph": "s"})

    def end(self, event: Event, at_us: float) -> Iterator[Entry]:
        """Yield the entries of a received message and of the end of its arrow."""
        source = int(event.get("source"))
        number, begun_us = self._arrows.end((source, self._rank, int(event.get("tag"))))
        at_us = max(at_us, self._free_us, begun_us + _MESSAGE_US)
        yield from self._entries(RECEIVED, f"from {source}", event, at_us, number, {"ph": "f", "bp": "e"})

    def _entries(
        self, track: int, words: str, event: Event, at_us: float, number: int | None, end: Entry
    ) -> Iterator[Entry]:
        self._free_us = at_us + _MESSAGE_US
        tag = event.get("tag")
        facts = {"tag": tag, "nbytes": event.get("nbytes")}
        yield _span(self._pid, track, f"{words}, tag {tag}", at_us, self._free_us, facts)
        if number is not None:
            arrow = {"cat": "message", "name": f"tag {tag}", "id": f"{number:#x}", "pid": self._pid, "tid": track}
            yield {**end, **arrow, "ts": round(at_us, 3)}


class _CounterNames:
    """Names the counter of each open policy's metric. No two open policies have the same name."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, int, str]] = {}  # plain name, number and full name of each open policy
        self._used: set[str] = set()
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._freed: defaultdict[str, list[int]] = defaultdict(list)  # heap of free numbers for each plain name

    def open(self, policy: int, policy_name: str) -> None:
        """Choose a name for a policy's counter that no other open policy uses."""
        plain = f"metric of {policy_name}" if policy_name else "metric"
        while True:
            number = heapq.heappop(self._freed[plain]) if self._freed[plain] else next(self._numbers[plain])
            name = plain if number == 1 else f"{plain} #{number}"
            if name not in self._used:
                break
        self.close(policy)
        self._names[policy] = plain, number, name
        self._used.add(name)

    def close(self, policy: int) -> None:
        if policy in self._names:
            plain, number, name = self._names.pop(policy)
            self._used.remove(name)
            heapq.heappush(self._freed[plain], number)

    def name_of(self, policy: int) -> str:
        return self._names[policy][2] if policy in self._names else "metric"


class _Tracks:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._counters = _CounterNames()
        self._roles: dict[int, tuple[float, int, str]] = {}  # begin, round and state of each policy's current role
        # For each track: the sorted ends of the last spans on it (number 0) and on its additional tracks (-1, -2, ...).
        self._ends_us: defaultdict[int, list[tuple[float, int]]] = defaultdict(lambda: [(-math.inf, 0)])

    def entries(self, event: Event, at_us: float) -> Iterator[Entry]:
        at = {"pid": self._pid, "ts": round(at_us, 3)}
        if event.kind == "policy":
            self._counters.open(int(event.get("policy")), str(event.get("name") or ""))
        elif event.kind == "closed":
            self._counters.close(int(event.get("policy")))
        match event.kind:
            case "role":
                policy, state = int(event.get("policy")), str(event.get("state"))
                yield from self._role(policy, at_us)
                if state not in ("idle", "out"):
                    self._roles[policy] = at_us, int(event.get("round")), state
            case "step":
                facts = {"iteration": event.get("iteration")}
                yield from self._added(STEPS, "policy.step", at_us - 1e6 * float(event.get("seconds")), at_us, facts)
            case "metric":
                value, name = float(event.get("value")), self._counters.name_of(int(event.get("policy")))
                if math.isfinite(value):
                    yield {"ph": "C", "name": name, "tid": STEPS, **at, "args": {"metric": value}}
                else:  # a counter can only have finite values
                    yield {"ph": "i", "s": "t", "name": f"{name} {value}", "tid": STEPS, **at}
            case "waited":
                began_us, what = at_us - 1e6 * float(event.get("seconds")), str(event.wait)
                yield from self._added(WAITS, what, began_us, at_us, {}, slack_us=_WAIT_SLACK_US)
            case kind if kind in _POINTS:
                facts = dict(zip(KINDS[kind], event.fields, strict=False))
                yield {"ph": "i", "s": "t", "name": kind, "tid": ROUNDS, **at, "args": facts}

    def rest(self, at_us: float) -> Iterator[Entry]:
        """Yield a span for each policy's role that lasted until the end of the recording."""
        for policy in list(self._roles):
            yield from self._role(policy, at_us)

    def _role(self, policy: int, until_us: float) -> Iterator[Entry]:
        if policy in self._roles:
            began_us, number, state = self._roles.pop(policy)
            yield from self._added(ROUNDS, state, began_us, until_us, {"round": number})

    def _added(
        self, track: int, name: str, began_us: float, until_us: float, facts: Entry, *, slack_us: float = 0.0
    ) -> Iterator[Entry]:
        """Yield a span that begins at 0 or later, on a track, or on an additional track if it overlaps another span.

        Perfetto ignores overlapping spans and spans that begin before 0.
        """
        ends_us = self._ends_us[track]
        # Among free tracks, the span is drawn on the track whose last span ended most recently.
        latest = round(began_us + slack_us, 3)
        index = bisect.bisect_right(ends_us, latest, key=lambda last: round(last[0], 3)) - 1
        end_us, place = ends_us.pop(index) if index >= 0 else (-math.inf, -len(ends_us))
        beside = track - place * len(TRACKS)
        if index < 0:
            yield _meta("thread_name", self._pid, beside, TRACKS[track])
        began_us = min(max(began_us, end_us, 0.0), until_us)
        bisect.insort(ends_us, (until_us, place))
        yield _span(self._pid, beside, name, began_us, until_us, facts)


def _span(pid: int, track: int, name: str, began_us: float, until_us: float, facts: Entry) -> Entry:
    began_us = round(began_us, 3)
    dur = round(round(until_us, 3) - began_us, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": track, "ts": began_us, "dur": dur, "args": facts}


def _profile(recording: Recording, clocks: Clocks, path: Path, number: int) -> list[str]:
    """Read a trace of torch's profiler, convert its times to the job's time, and renumber its processes.

    The trace names its rank if the program uses torch.distributed. Otherwise, the process number determines the rank.
    """
    try:
        return list(map(_as_json, _profiler_entries(recording, clocks, _read_json(path), number)))
    except Exception as error:  # a file may have any content
        raise TraceError(
            f"{path} must be a trace of torch's profiler, but reading it raised {type(error).__name__}: {error}"
        ) from error


def _read_json(path: Path) -> Any:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(_PROFILE_NBYTES_MAX + 1)
    if len(data) > _PROFILE_NBYTES_MAX:
        raise ValueError(f"it has more than {_PROFILE_NBYTES_MAX >> 20} MiB, uncompressed")
    return json.loads(data)


def _profiler_entries(recording: Recording, clocks: Clocks, content: Any, number: int) -> Iterator[Entry]:
    # Processes on different hosts may have the same pid.
    process_counts = Counter(each.header.pid for each in recording.ranks)
    rank_of_pid = {each.header.pid: each.rank for each in recording.ranks if process_counts[each.header.pid] == 1}
    entries = content["traceEvents"] if isinstance(content, dict) else content
    base_s = content.get("baseTimeNanoseconds", 0) / 1e9 if isinstance(content, dict) else 0.0
    rank = content.get("distributedInfo", {}).get("rank") if isinstance(content, dict) else None
    first_us = min(float(entry["ts"]) for entry in entries if entry.get("ph") == "X")
    shift_us = 1e6 * (base_s - clocks.began_at_s)
    if abs(first_us + shift_us) > 1e6 * 86400 * 365:  # over a year: the trace has no wall-clock time
        shift_us = -first_us
    pids: dict[Any, int] = {}
    arrows: dict[Any, int] = {}
    for entry in entries:
        pid = pids.setdefault(entry.get("pid"), _PROFILER_PID * (number + 1) + len(pids))
        moved = {**entry, "pid": pid}
        if "ts" in entry:
            moved["ts"] = float(entry["ts"]) + shift_us
            if not math.isfinite(moved["ts"]):
                raise ValueError(f"the time of an entry must be a finite number, got {entry['ts']!r:.80}")
        if entry.get("ph") in ("s", "t", "f"):
            arrow = arrows.setdefault(entry.get("id"), len(arrows))
            moved["id"] = f"{_PROFILER_ARROWS + number * _ARROWS + arrow:#x}"
        owner = rank_of_pid.get(entry.get("pid")) if rank is None else rank
        if entry.get("name") == "process_name" and owner is not None:
            moved["args"] = {"name": f"rank {owner}, torch: {entry.get('args', {}).get('name', '')}"}
        yield moved
