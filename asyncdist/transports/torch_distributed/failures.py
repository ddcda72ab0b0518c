"""Shortens torch's error messages."""

from __future__ import annotations

import re


def reason(error: RuntimeError) -> str:
    """Return the message of a torch error without source location, advice and stack."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", text)
