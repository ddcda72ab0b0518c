"""Posts receives to a matcher."""

from __future__ import annotations

from asyncdist.transports.matching import Matcher, Receive


def post(matcher: Matcher, nbytes: int, source: int, tag: int) -> tuple[Receive, bytearray]:
    buffer = bytearray(nbytes)
    receive = Receive(matcher, buffer, source, tag)
    matcher.post(receive)
    return receive, buffer
