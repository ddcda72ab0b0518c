"""Aligns the clocks of a recording's hosts.

The ranks of a host share a monotonic clock, and therefore one offset, taken from the rank that began first. Machines
with the same hostname are separate hosts if their clocks differ by much more than wall clocks could. Hosts are aligned
by their wall clocks, which may differ by milliseconds. If a message would then arrive before it was sent, the receiving
host's clock is moved forward by the least time that corrects this. These times are longest paths in the graph of such
constraints (Duda et al., "Estimating global time in distributed systems", ICDCS 1987). If no offsets correct all
messages, because one clock runs faster than another, the wall-clock offsets are kept.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncdist.recording.events import whole
from asyncdist.recording.reader import Line, RankRecording, Recording

#: Maximum number of passes over all pairs of hosts. A correction that needs more contradicts itself.
_ROUND_COUNT_MAX: Final = 64
#: Maximum seconds by which the wall clock of a machine may be adjusted during a job.
_OFFSET_S: Final = 5.0


class Clocks:
    """Converts the times of a recording's events to seconds since the job began.

    Attributes:
        began_at_s: Time of the first event, in seconds since 1970.
    """

    def __init__(self, recording: Recording) -> None:
        self.began_at_s = 0.0
        self._first_s = {each.path: _first_time_of(each) for each in recording.ranks}
        self._hosts: dict[Path, str] = {}
        self._offsets: dict[str, float] = {}
        for each in sorted(recording.ranks, key=lambda each: each.header.unix_s):
            offset = each.header.unix_s - each.header.clock_s
            host = self._hosts[each.path] = self._host_of(each.header.hostname, offset)
            self._offsets.setdefault(host, offset)
        self._set_zero(recording)
        if len(self._offsets) > 1:
            self._correct(recording)
            self._set_zero(recording)

    def _host_of(self, hostname: str, offset_s: float) -> str:
        """Return the hostname, with a number if an earlier machine with this hostname has another clock."""
        names = (hostname if number == 1 else f"{hostname} {number}" for number in itertools.count(1))
        return next(name for name in names if abs(self._offsets.get(name, offset_s) - offset_s) <= _OFFSET_S)

    def _set_zero(self, recording: Recording) -> None:
        for _ in range(2):  # the first pass uses seconds since 1970, which are exact only to a quarter of a microsecond
            zero = min(self.offset(each) + self._first_s[each.path] for each in recording.ranks)
            self.began_at_s += zero
            self._offsets = {host: offset - zero for host, offset in self._offsets.items()}

    def offset(self, each: RankRecording) -> float:
        """Return the seconds to add to the event times of a file."""
        return self._offsets[self._hosts[each.path]]

    def _correct(self, recording: Recording) -> None:
        """Shift the clocks of hosts forward until no message arrives before it was sent."""
        delays = self._least_delays(recording)
        shifts = dict.fromkeys(self._offsets, 0.0)
        for _ in range(_ROUND_COUNT_MAX):
            is_changed = False
            for (source, dest), delay_s in delays.items():
                short = shifts[source] - shifts[dest] - delay_s
                if short > 1e-9:
                    shifts[dest] += short
                    is_changed = True
            if not is_changed:
                break
        else:
            return
        for host, shift in shifts.items():
            self._offsets[host] += shift

    def _least_delays(self, recording: Recording) -> dict[tuple[str, str], float]:
        """Return the minimum delay of messages in seconds, keyed by (source host, destination host)."""
        hosts = {each.rank: self._hosts[each.path] for each in recording.ranks}
        sent, received = self._messages_between_hosts(recording, hosts)
        delays: dict[tuple[str, str], float] = {}
        for line, times in received.items():
            pair = hosts[line[0]], hosts[line[1]]
            least = min((end - begin for begin, end in zip(sent.get(line, ()), times, strict=False)), default=None)
            if least is not None:
                delays[pair] = min(least, delays.get(pair, least))
        return delays

    def _messages_between_hosts(
        self, recording: Recording, hosts: Mapping[int, str]
    ) -> tuple[dict[Line, array[float]], dict[Line, array[float]]]:
        """Return the times of sends and of receives, in order, keyed by (source, destination, tag).

        The k-th send with a key belongs to the k-th receive with that key. Messages of restarted ranks are omitted,
        because messages to an earlier process may be lost.
        """
        restarted = recording.restarted
        sent: dict[Line, array[float]] = {}
        received: dict[Line, array[float]] = {}
        for each in recording.ranks:
            if each.rank in restarted:
                continue
            offset = self.offset(each)
            for event in each.events():
                if event.kind not in ("sent", "received"):
                    continue
                other, tag = whole(event.fields[0]), whole(event.fields[1])
                if other not in restarted and hosts.get(other, hosts[each.rank]) != hosts[each.rank]:
                    is_sent = event.kind == "sent"
                    line, into = ((each.rank, other, tag), sent) if is_sent else ((other, each.rank, tag), received)
                    into.setdefault(line, array("d")).append(event.time_s + offset)
        return sent, received


def _first_time_of(each: RankRecording) -> float:
    """Return the time of a file's first event. A rank may send a message before it writes its header."""
    return min([each.header.clock_s, *(event.time_s for event in itertools.islice(each.events(), 1))])
