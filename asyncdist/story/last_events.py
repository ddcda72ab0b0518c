"""Describes what each rank of a job did last, from its recording, for jobs that have ended or were killed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from asyncdist.recording.events import Event
from asyncdist.recording.reader import MessageCounts, RankRecording, Recording, read_recording
from asyncdist.story.event_texts import ABORT, describe_events
from asyncdist.validation import printable
from asyncdist.wording import has_or_have, plural, ranks_in_words, seconds_in_words

#: Maximum number of events that are shown for each rank.
EVENT_COUNT_MAX: Final = 3
RANK_COUNT_MAX: Final = 24
PAIR_COUNT_MAX: Final = 8


@dataclass(slots=True)
class _LastEvents:
    """Collects the last events of a rank.

    Attributes:
        last_s: Time of the rank's last event, in seconds since 1970.
        over: Error that ended ``main``, "" if ``main`` returned, or None if the end of ``main`` is not recorded.
        cut: Recorded reason why the file ends before ``main`` does, or "".
        reports: Last recorded report on the ranks of this rank's host. The key True is for reports before an abort, and
            False for all others.
        latest: Latest other events, oldest first.
    """

    file: RankRecording
    last_s: float
    steps: int = 0
    over: str | None = None
    cut: str = ""
    waited: Event | None = None
    reports: dict[bool, Event] = field(default_factory=dict)
    latest: deque[Event] = field(default_factory=lambda: deque(maxlen=64))


def describe_recording(folder: str, job: str | None = None) -> str:
    """Describe what each rank of a recorded job did last, in several lines.

    A wait is recorded when it ends. A wait in progress at the end is shown only if a signal ended it, or if the job
    reported a lack of progress or an abort. ``job`` selects one of several jobs in the folder. Raise RecordingError if
    the job is not unique or is unreadable.
    """
    recording = read_recording(folder, job)
    messages = MessageCounts()
    # For a restarted rank, the last events are those of its last process.
    ranks = {each.rank: _last_events_of(each, messages) for each in recording.ranks}
    end_s = max(each.last_s for each in ranks.values())
    lines = [_title(recording, end_s)]
    if recording.missing:
        lines.append(f"  {ranks_in_words(recording.missing)} wrote no recording")
    lines += [
        f"  {plural(count, 'message')} of rank {source} on tag {tag} never reached rank {dest}"
        for count, (source, dest, tag) in messages.lost(ranks)[:PAIR_COUNT_MAX]
    ]
    ended = [rank for rank, each in ranks.items() if each.over == ""]
    if ended:
        lines.append(f"  {ranks_in_words(ended)} {has_or_have(ended)} returned from main")
    others = sorted((rank for rank in ranks if rank not in ended), key=lambda rank: (ranks[rank].last_s, rank))
    if others:
        lines += _host_reports(ranks, end_s)
    for rank in others[:RANK_COUNT_MAX]:
        lines += _rank(rank, ranks[rank], end_s)
    if len(others) > RANK_COUNT_MAX:
        lines.append(f"  and {len(others) - RANK_COUNT_MAX} more")
    return "\n".join(map(printable, lines))


def _title(recording: Recording, end_s: float) -> str:
    script = recording.ranks[0].header.script or "no script"
    length = seconds_in_words(max(0.0, end_s - recording.began_at))
    return f"job {recording.job}: {script}, {plural(recording.size, 'rank')}, recorded for {length}"


def _last_events_of(file: RankRecording, messages: MessageCounts) -> _LastEvents:
    """Collect the last events of a process, and add its messages to ``messages``."""
    found = _LastEvents(file, file.header.unix_s)
    event = None
    for event in file.events():
        match event.kind:
            case "step":
                found.steps = event.get("iteration") + 1
            case "over":
                found.over = event.get("error")
            case "cut":
                found.cut = event.get("why")
            case "waited":
                found.waited = event
            case "told":
                found.reports[str(event.get("story")).startswith(ABORT)] = event
            case "sent" | "received":
                messages.add(file.rank, event)
            case "metric" | "clock" | "safe_point" | "heard" | "deadline":
                pass
            case _:
                found.latest.append(event)
    if event is not None:
        found.last_s = file.unix_s(event.time_s)
    return found


def _rank(rank: int, last: _LastEvents, end_s: float) -> list[str]:
    age = seconds_in_words(max(0.0, end_s - last.last_s))
    how = f"its recording {last.cut or 'ends before main does'}"
    if last.over:
        words = [line.strip() for line in last.over.splitlines() if line.strip()]
        # The message of a worker's error may contain a whole traceback.
        how = f"ended by {' ... '.join([*words[:1], *words[1:][-1:]]).rstrip(': ')}"
    lines = [f"  rank {rank}: {how}; its last event was {age} before the job's last event"]
    if last.steps:
        # A killed process loses the events that it has not written yet (see asyncdist.recording.writer).
        lost = "later steps are not" if last.cut else "steps of its last second may not be"
        more = f" or more: {lost} recorded" if last.over is None else ""
        lines.append(f"    {last.steps} steps{more}")
    now = end_s - last.file.unix_s(0.0)
    if last.waited is not None:
        ago = seconds_in_words(max(0.0, now - last.waited.time_s))
        seconds = seconds_in_words(last.waited.get("seconds"))
        lines.append(f"    last waited for {last.waited.wait}, for {seconds}, until {ago} before the end")
    if texts := describe_events(last.latest, now, EVENT_COUNT_MAX):
        lines.append(f"    lately: {'; '.join(texts)}")
    return lines


def _host_reports(ranks: dict[int, _LastEvents], end_s: float) -> list[str]:
    """Return lines with each host's last report of missing progress and its last report before an abort."""
    latest: dict[tuple[str, bool], tuple[float, str]] = {}
    for last in ranks.values():
        for event in last.reports.values():
            story = str(event.get("story"))
            key = last.file.header.hostname, story.startswith(ABORT)
            latest[key] = max(latest.get(key, (0.0, "")), (last.file.unix_s(event.time_s), story))
    lines = []
    for at_s, story in sorted(latest.values()):
        first, *others = story.splitlines() or [""]
        lines.append(f"  reported {seconds_in_words(max(0.0, end_s - at_s))} before the end: {first}")
        lines += [f"  {line}" for line in others]
    return lines
