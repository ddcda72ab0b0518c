"""Filters the standard error of mpirun and its ranks.

All bytes are passed through except these:

- Messages in which mpirun blames the rank that ended first. This rank often stopped only because a different rank had
  failed, so the launcher reports that failure instead.
- A line in which mpirun says that it could not notify a rank that has just ended.
- Reports of guardians (processes that supervise ranks) on other hosts, each in a line with a mark.

The filter also detects two kinds of messages. One says that mpirun has lost a host, which mpirun's exit code does not
show. The other says that a rank has no connection to another host. Open MPI then ends the job without raising an error
in Python.
"""

from __future__ import annotations

import re
from typing import Final

#: Messages of mpirun 5 (PRRTE 3) when it ends a job because a host does not respond.
_LOST_HOST: Final = (
    b"PRTE has lost communication with a remote daemon",
    b"A daemon failed to report back after being spawned",
)
_LOST_NODE: Final = re.compile(rb"Remote daemon: \[\S+\] on node (\S+)\n")
_RULE: Final = b"-" * 74 + b"\n"
#: Beginnings of messages that blame a rank, in Open MPI 5 and in earlier versions.
_BLAMES: Final = tuple(
    _RULE + who + what
    for who in (b"prterun ", b"mpirun ", b"mpiexec ")
    for what in (
        b"detected that one or more processes exited with non-zero status",
        b"noticed that process rank ",
        b"has exited due to process rank ",
    )
)
#: Message of Open MPI 5 about a rank that has ended before mpirun could notify it of an event.
_UNNOTIFIED_WORDS: Final = b"PMIX ERROR: PMIX_ERR_UNREACH in file "
_UNNOTIFIED: Final = re.compile(rb"\[[^\s\]]+:\d+\] " + _UNNOTIFIED_WORDS + rb"\S*pmix_server\.c at line \d+\n")
#: Open MPI's message about a refused or unanswered connection, with the host or address and the reason.
_UNREACHED: Final = (
    re.compile(rb"peer: (\S+) Unable to connect to the peer (\S+ on port \d+: [^\n]*)\n"),
    re.compile(rb"Message: +connect\(\) to (\S+):\d+ failed\n +Error: +([^\n]*) \(\d+\)\n"),
)
#: Open MPI's message about a silent connection. If a rank was killed, Open MPI prints a different message.
_SILENT: Final = re.compile(
    rb"peer: (\S+) mca_btl_tcp_frag_\w+: \w+ failed: (Connection timed out|[^\n]*unreachable) \("
)
#: Open MPI's message about a rank that ends the job because it has lost a connection.
_ENDER: Final = re.compile(
    rb"An error occurred in Socket closed\s+\[([^]\s:]+):\d+\] \*\*\* reported by process \[\d+,(\d+)\]"
)
#: Number of earlier bytes to keep so that messages that arrive in pieces are recognised.
_LONGEST: Final = 1024


class MpirunOutputFilter:
    """Filters mpirun's standard error as the bytes arrive. Reports from guardian processes begin with ``mark``.

    Attributes:
        blames: Suppressed messages that blame a rank.
        lost_node: Name of the host that mpirun has lost, if mpirun printed it.
        silent: Host to which a rank has lost its connection, and the reason, if any.
        unreached: Host that a rank could not reach, and the reason, if any.
        ender: Host and number of the rank that ended the job because it lost a connection, if any.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._rest = b""
        self._recent = b""
        self._is_at_line_start = True
        self.blames: list[bytes] = []
        self.reports: list[bytes] = []
        self.has_lost_host = False
        self.lost_node: tuple[str, ...] | None = None
        self.silent: tuple[str, ...] | None = None
        self.unreached: tuple[str, ...] | None = None
        self.ender: tuple[str, ...] | None = None

    @property
    def has_held_bytes(self) -> bool:
        """Whether the filter is holding back bytes that may be the beginning of a message."""
        return bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Process the next bytes, and return the bytes to print."""
        self._rest += data
        passed = b""
        while (part := self._next()) is not None:
            passed += part
        self._recent = (self._recent + passed)[-(len(passed) + _LONGEST) :]
        self.has_lost_host = self.has_lost_host or any(words in self._recent for words in _LOST_HOST)
        self.lost_node = self.lost_node or _groups_of(_LOST_NODE.search(self._recent))
        self.silent = self.silent or _groups_of(_SILENT.search(self._recent))
        for words in _UNREACHED:
            self.unreached = self.unreached or _groups_of(words.search(self._recent))
        self.ender = self.ender or _groups_of(_ENDER.search(self._recent))
        self._recent = self._recent[-_LONGEST:]
        return passed

    def explain_connection(self, survival_option: str = "") -> str | None:
        """Explain the lost connection that ended the job, and suggest ``survival_option``. Return None without one."""
        if self.ender is None:  # MPI used another network, or a rank raised the error itself
            return None
        host, rank = self.ender
        reach = (
            "See that the hosts reach each other and that no firewall is between them; if they have several networks, "
            "name the one that connects them: OMPI_MCA_btl_tcp_if_include=10.0.0.0/24, or the interface's name"
        )
        if self.unreached is None and self.silent is not None:
            peer, reason = self.silent
            return f"rank {rank} on {host} lost its connection to {peer} ({reason}), so MPI ended the job. {reach}"
        if self.unreached is None:
            return (
                f"rank {rank} on {host} lost its connection to another rank, so MPI ended the job: the other rank was "
                "killed (dmesg on its host says whether memory was short), or its host was lost"
                + f" ({survival_option} lets the others continue)"
                * bool(survival_option)
            )
        peer, reason = self.unreached
        return f"rank {rank} on {host} could not connect to {peer} ({reason}), so MPI ended the job. {reach}"

    def explain_lost_host(self) -> str:
        """Return a line about the host that mpirun has lost."""
        where = f": see that {self.lost_node[0]} runs and that its network is up" if self.lost_node else ""
        return f"mpirun has lost a host, and ended the job early{where}"

    def flush(self) -> bytes:
        """Return the bytes that are being held back. Called if the rest of a message does not arrive in time."""
        held, self._rest = self._rest, b""
        self._is_at_line_start = held.endswith(b"\n")
        return held

    def _next(self) -> bytes | None:
        """Return the next line or part of a line from the held bytes. Return None if more bytes are needed first."""
        if self._is_at_line_start:
            if self._rest.startswith(_BLAMES):
                end = self._rest.find(b"\n" + _RULE, len(_RULE)) + 1
                if not end:
                    return None
                end += len(_RULE)
                self.blames.append(self._rest[:end])
                self._rest = self._rest[end:]
                return b""
            if any(blame.startswith(self._rest) for blame in _BLAMES):  # also true if ``_rest`` is empty
                return None
            if (unnotified := _UNNOTIFIED.match(self._rest)) is not None:
                self._rest = self._rest[unnotified.end() :]
                return b""
            if _may_become_unnotified(self._rest):
                return None
        return self._next_line()

    def _next_line(self) -> bytes | None:
        line, newline, rest = self._rest.partition(b"\n")
        place = line.find(self._mark)
        if place < 0 and not newline:
            place = line.rfind(self._mark[:1])
            if place >= 0 and not self._mark.startswith(line[place:]):
                place = -1
        if place >= 0 and not newline:
            self._rest, line = line[place:], line[:place]
            self._is_at_line_start = self._is_at_line_start and not line
            return line or None
        self._rest = rest
        if place >= 0:
            self.reports.append(line[place + len(self._mark) :])
            self._is_at_line_start = self._is_at_line_start and not place
            return line[:place]
        self._is_at_line_start = bool(newline)
        return line + newline if line or newline else None


def _may_become_unnotified(data: bytes) -> bool:
    """Return whether ``data`` is the beginning of an :data:`_UNNOTIFIED` line that further bytes may complete."""
    if not data.startswith(b"[") or b"\n" in data or len(data) > _LONGEST:
        return False
    host, is_host_complete, words = data.partition(b"] ")
    if not is_host_complete:
        return not host[:-1].count(b"]") and not re.search(rb"\s", host)
    return words.startswith(_UNNOTIFIED_WORDS) or _UNNOTIFIED_WORDS.startswith(words)


def _groups_of(found: re.Match[bytes] | None) -> tuple[str, ...] | None:
    return tuple(group.decode(errors="replace") for group in found.groups()) if found else None
