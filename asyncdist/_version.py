"""Defines the versions of asyncdist and of its message format."""

from typing import Final

__version__: Final = "0.1.0"
#: Version of the format of messages (:mod:`asyncdist.messaging.wire`).
FRAME_VERSION: Final = 2


def describe_version() -> str:
    """Return both versions, which must be equal on all ranks of a job."""
    return f"asyncdist {__version__}, frames {FRAME_VERSION}"
