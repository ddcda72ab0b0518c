"""Defines the reserved message tags, and records which tags are in use on this rank.

All users of the runtime share one range of tags. A second claim to a tag fails before any message can reach the wrong
receiver. The MPI standard guarantees tags only up to 32767 (MPI-4.1 section 9.1.2), so this is the limit for every
transport.
"""

from __future__ import annotations

from typing import Final

from asyncdist.errors import LocalProtocolError

TAG_MAX: Final = 32767

METRIC: Final = 7001
CONTROL: Final = 7002
REPLAY: Final = 7003
COLLECTIVE_FIRST: Final = 7100  # first tag for groups without their own MPI communicator, which take one tag each
COLLECTIVE_LAST: Final = 7999
PARAM: Final = 8000
BULK_FIRST: Final = 8001  # first tag for bulk transfers; the slot number is added
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
    (METRIC, BULK_LAST, "protocols to come"),  # reserves the unassigned tags in this range
)


class TagRegistry:
    """Records which owner, such as a channel or a policy, uses each tag on this rank."""

    def __init__(self) -> None:
        self._owners: dict[int, str] = {}

    def claim(self, tag: int, owner: str) -> None:
        """Reserve ``tag`` for ``owner``, which may already have it. Raise LocalProtocolError if it is not available."""
        check_tag(tag)
        for first, last, purpose in _RESERVED:
            if first <= tag <= last:
                raise LocalProtocolError(
                    f"tag must be from 0 to {METRIC - 1} or from {BULK_LAST + 1} to {TAG_MAX}, got {tag}, which is "
                    f"reserved for {purpose}",
                    tag=tag,
                )
        holder = self._owners.setdefault(tag, owner)
        if holder != owner:
            raise LocalProtocolError(
                f"tag must not be in use already, got {tag} for {owner}, which {holder} uses", tag=tag
            )

    def release(self, tag: int) -> None:
        """Make ``tag`` available again, if an owner has claimed it."""
        self._owners.pop(tag, None)


def is_for_users(tag: int) -> bool:
    """Return whether a user's channel may use ``tag``."""
    return 0 <= tag < METRIC or BULK_LAST < tag <= TAG_MAX


def check_tag(tag: int) -> None:
    """Raise LocalProtocolError unless ``tag`` is an int from 0 to 32767."""
    if type(tag) is not int or not 0 <= tag <= TAG_MAX:
        raise LocalProtocolError(f"tag must be an integer from 0 to {TAG_MAX}, got {tag!r}", tag=tag)
