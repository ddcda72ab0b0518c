"""Applies the faults of a plan that affect messages and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncdist.simulation.faults import Corrupt, Delay, Fault, Kill, Partition, SlowLink
from asyncdist.tags import BULK_FIRST, BULK_LAST, COLLECTIVE_FIRST, COLLECTIVE_LAST


class MessageFaults:
    """Counts the messages of each rank, and applies the faults that affect messages and links.

    :class:`Kill` counts all messages of a sender. The other faults count the messages from one sender to one receiver.
    When a fault fires, ``on_fired`` is called with its index in the plan. To kill a rank, ``on_kill`` is called with
    the rank and the index. :meth:`apply` is needed only if ``has_message_faults``, and the other methods only if
    ``has_link_faults``.
    """

    def __init__(
        self,
        size: int,
        faults: Sequence[Fault],
        on_fired: Callable[[int], None],
        on_kill: Callable[[int, int], None],
    ) -> None:
        self._on_fired = on_fired
        self._on_kill = on_kill
        self._sent_counts = [0] * size
        self._pair_counts: dict[tuple[int, int], int] = {}
        self._frame_counts: dict[tuple[int, int], int] = {}
        self._kills: dict[tuple[int, int], int] = {}
        self._delays: dict[tuple[int, int, int], list[tuple[int, Delay]]] = {}
        self._corruptions: dict[tuple[int, int, int], list[tuple[int, Corrupt]]] = {}
        self._slow_links: list[tuple[int, SlowLink]] = []
        self._partitions: list[tuple[int, Partition]] = []
        for index, fault in enumerate(faults):
            match fault:
                case Kill(rank, at_message=int(number)):
                    # If several faults kill the sender at the same message, only the first fires.
                    self._kills.setdefault((rank, number), index)
                case Delay(source, dest, number):
                    self._delays.setdefault((source, dest, number), []).append((index, fault))
                case Corrupt(source, dest, number):
                    self._corruptions.setdefault((source, dest, number), []).append((index, fault))
                case SlowLink():
                    self._slow_links.append((index, fault))
                case Partition():
                    self._partitions.append((index, fault))
        self.has_message_faults = bool(self._kills or self._delays or self._corruptions)
        self.has_link_faults = bool(self._slow_links or self._partitions)

    def apply(
        self, source: int, dest: int, tag: int, data: bytes | bytearray | memoryview
    ) -> tuple[bytes | bytearray | memoryview, float]:
        """Apply faults to the next message from ``source``. Return its data and additional delay in seconds."""
        pair = (source, dest)
        self._sent_counts[source] += 1
        kill = self._kills.get((source, self._sent_counts[source]))
        if kill is not None:
            self._on_kill(source, kill)
            return data, 0.0
        number = self._pair_counts[pair] = self._pair_counts.get(pair, 0) + 1
        if not _is_raw(tag):
            framed = self._frame_counts[pair] = self._frame_counts.get(pair, 0) + 1
            corruptions = self._corruptions.get((*pair, framed))
            if corruptions is not None and len(data):
                changed = bytearray(data)
                for index, corruption in corruptions:
                    place = corruption.byte % len(changed)
                    # Adding a number twice, unlike XOR, changes the byte even if two faults corrupt it.
                    changed[place] = (changed[place] + 0x55) % 256
                    self._on_fired(index)
                data = bytes(changed)
        delay_s = 0.0
        for index, delay in self._delays.get((*pair, number), ()):
            delay_s += delay.duration_s
            self._on_fired(index)
        return data, delay_s

    def link_factor(self, pair: tuple[int, int], now: float) -> float:
        """Return the factor by which slow links multiply the transit time of a message sent at ``now``."""
        factor = 1.0
        for index, fault in self._slow_links:
            if (fault.source, fault.dest) == pair and now >= fault.at_s:
                factor *= fault.factor
                self._on_fired(index)
        return factor

    def after_partitions(self, pair: tuple[int, int], now: float, arrival: float) -> float:
        """Return the arrival time of a message. ``arrival`` is its arrival time without partitions."""
        between = [
            (index, fault)
            for index, fault in self._partitions
            if now < fault.until_s and (pair[0] in fault.ranks) != (pair[1] in fault.ranks)
        ]
        for index, fault in sorted(between, key=lambda entry: entry[1].at_s):
            if fault.at_s < arrival < fault.until_s:
                self._on_fired(index)
                arrival = fault.until_s
        return arrival


def _is_raw(tag: int) -> bool:
    """Return whether messages with this tag are sent without a frame, and therefore without a CRC."""
    return BULK_FIRST <= tag <= BULK_LAST or COLLECTIVE_FIRST <= tag <= COLLECTIVE_LAST
