"""Defines the reserved message tags and the registry of the owners of all other tags on this rank.

The whole runtime has one namespace. If two owners claim one tag, the second claim fails, before any message is
misrouted. The MPI standard guarantees tags up to 32767 only (MPI-4.1 section 9.1.2), so that is the limit everywhere.
"""

from __future__ import annotations

from typing import Final

from asyncdist.errors import LocalProtocolError

TAG_MAX: Final = 32767

METRIC: Final = 7001
CONTROL: Final = 7002
REPLAY: Final = 7003
COLLECTIVE_FIRST: Final = 7100  # one tag per group without a native communicator, agreed when the group is made
COLLECTIVE_LAST: Final = 7999
PARAM: Final = 8000
BULK_FIRST: Final = 8001  # plus a slot number
BULK_SLOT_COUNT: Final = 4096
BULK_LAST: Final = BULK_FIRST + BULK_SLOT_COUNT - 1
BULK: Final = range(BULK_FIRST, BULK_LAST + 1)

_RESERVED: Final = (
    (METRIC, METRIC, "metric reports"),
    (CONTROL, CONTROL, "control messages"),
    (REPLAY, REPLAY, "replay buffers"),
    (COLLECTIVE_FIRST, COLLECTIVE_LAST, "collectives"),
    (PARAM, PARAM, "parameter-stream control"),
    (BULK_FIRST, BULK_LAST, "bulk streams"),
    (METRIC, BULK_LAST, "protocols to come"),  # the tags between the reserved ones
)


class TagRegistry:
    """Tracks which owner holds which tag."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}

    def claim(self, tag: int, owner: str) -> None:
        """Take ``tag`` for ``owner``, which may take it repeatedly.

        Raises:
            LocalProtocolError: The tag is out of range, reserved by the runtime, or held by another owner.
        """
        check_tag(tag)
        for first, last, purpose in _RESERVED:
            if first <= tag <= last:
                raise LocalProtocolError(
                    f"tag {tag} is reserved for {purpose}; choose one from 0 to {METRIC - 1} "
                    f"or from {BULK_LAST + 1} to {TAG_MAX}",
                    tag=tag,
                )
        holder = self._owners.setdefault(tag, owner)
        if holder != owner:
            raise LocalProtocolError(f"tag {tag} belongs to {holder}; {owner} must use another", tag=tag)

    def release(self, tag: int) -> None:
        """Free ``tag``; do nothing if it is free already."""
        self._owners.pop(tag, None)


def is_for_users(tag: int) -> bool:
    """Return whether ``tag`` may be used for a user's channel."""
    return 0 <= tag < METRIC or BULK_LAST < tag <= TAG_MAX


def check_tag(tag: int) -> None:
    """Raise if a value is not a tag.

    Raises:
        LocalProtocolError: ``tag`` is not an int from 0 to 32767.
    """
    if type(tag) is not int or not 0 <= tag <= TAG_MAX:
        raise LocalProtocolError(f"a tag is an int from 0 to {TAG_MAX}, not {tag!r}", tag=tag)
