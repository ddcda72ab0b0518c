"""Reads what an mpirun, and the ranks below it, write to standard error. Pure: bytes go in, and those for the user out.

Three things are looked for among the bytes, which pass through as they come otherwise:

- Blocks in which mpirun names the rank that has ended first. That is often one that stops because another one has
  failed, so the launcher reports the failure in their place.
- Reports of guardians on other hosts, each in a line with a mark.
- That mpirun has lost a host: its exit code does not say so.
- That a rank has no connection to another host, at which Open MPI ends the job from within its C code: no rank can
  raise an error.
"""

from __future__ import annotations

import re
from typing import Final

#: What mpirun 5 (PRRTE 3) says before it ends a job since a host does not answer, or has not since it was reached.
_LOST_HOST: Final = (
    b"PRTE has lost communication with a remote daemon",
    b"A daemon failed to report back after being spawned",
)
_LOST_NODE: Final = re.compile(rb"Remote daemon: \[\S+\] on node (\S+)\n")
_RULE: Final = b"-" * 74 + b"\n"
#: The beginnings of blocks that blame a rank, of Open MPI 5 and of the versions before.
_BLAMES: Final = tuple(
    _RULE + who + what
    for who in (b"prterun ", b"mpirun ", b"mpiexec ")
    for what in (
        b"detected that one or more processes exited with non-zero status",
        b"noticed that process rank ",
        b"has exited due to process rank ",
    )
)
#: Open MPI's words for a connection that was refused, or got no answer: they name a host or an address, and the reason.
_UNREACHED: Final = (
    re.compile(rb"peer: (\S+) Unable to connect to the peer (\S+ on port \d+: [^\n]*)\n"),
    re.compile(rb"Message: +connect\(\) to (\S+):\d+ failed\n +Error: +([^\n]*) \(\d+\)\n"),
)
#: Its words for a connection on which nothing arrives any longer. One that a killed rank has closed has others.
_SILENT: Final = re.compile(
    rb"peer: (\S+) mca_btl_tcp_frag_\w+: \w+ failed: (Connection timed out|[^\n]*unreachable) \("
)
#: Its words for the rank that ends the job since it has no connection to another one.
_ENDER: Final = re.compile(
    rb"An error occurred in Socket closed\s+\[([^]\s:]+):\d+\] \*\*\* reported by process \[\d+,(\d+)\]"
)
#: How many bytes are kept to recognise words that arrive in pieces.
_LONGEST: Final = 1024


class MpirunWords:
    """Takes in bytes as they arrive.

    Args:
        mark: The beginning of a report.

    Attributes:
        blames: The blocks that were kept back.
        reports: The reports that were found, without their marks.
        has_lost_host: Whether mpirun has lost a host.
        lost_node: The name of that host, if mpirun says it.
        silent: The host from which nothing arrives any longer, and the reason; None if there is none.
        unreached: The host that a rank could not reach, and the reason; None if there is none.
        ender: The host and the number of the rank that lost a connection, at which MPI ended the job; or None.
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
    def is_holding(self) -> bool:
        """Whether bytes are held that may be the beginning of something; :meth:`flush` returns them."""
        return bool(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that are for the user by now."""
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

    def explain_connection(self, goes_on_by: str = "") -> str | None:
        """Return the line for the user about a failed connection that has ended the job; None if none has.

        Args:
            goes_on_by: The option with which the others would have gone on after a kill; "" if there is none.
        """
        if self.ender is None:  # MPI has found another way, or a rank raises the error
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
                "killed (dmesg on its host says whether memory was short), or its host is gone"
                + f" ({goes_on_by} lets the others go on)"
                * bool(goes_on_by)
            )
        peer, reason = self.unreached
        return f"rank {rank} on {host} could not connect to {peer} ({reason}), so MPI ended the job. {reach}"

    def explain_lost_host(self) -> str:
        """Return the line for the user about a host that mpirun has lost."""
        where = f": see that {self.lost_node[0]} runs and that its network is up" if self.lost_node else ""
        return f"mpirun has lost a host, and ended the job before its end{where}"

    def flush(self) -> bytes:
        """Return the bytes that are held: nothing more has arrived for a while, or will."""
        held, self._rest = self._rest, b""
        self._is_at_line_start = held.endswith(b"\n")
        return held

    def _next(self) -> bytes | None:
        """Take the next line, or a part of it, from the held bytes; return None where more have to arrive before."""
        if self._is_at_line_start:
            if self._rest.startswith(_BLAMES):
                end = self._rest.find(b"\n" + _RULE, len(_RULE)) + 1
                if not end:
                    return None
                end += len(_RULE)
                self.blames.append(self._rest[:end])
                self._rest = self._rest[end:]
                return b""
            if any(blame.startswith(self._rest) for blame in _BLAMES):  # also nothing at all
                return None
        return self._take_line()

    def _take_line(self) -> bytes | None:
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


def _groups_of(found: re.Match[bytes] | None) -> tuple[str, ...] | None:
    return tuple(group.decode(errors="replace") for group in found.groups()) if found else None
