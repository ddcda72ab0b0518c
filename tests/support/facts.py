"""Patterns that match a message by its facts, so that a test does not depend on the wording.

For each error or printed line, one test at the cheapest layer has the wording; all others compare the facts.
"""

from __future__ import annotations

import re


def naming(*facts: object) -> str:
    """Return a pattern for ``match=``, for text that names each of the facts as a whole word, in any order."""
    return "(?s)" + "".join(rf"(?=.*{_whole(str(fact))})" for fact in facts)


def names(text: object, *facts: object) -> bool:
    """Return whether a string, or an error's message, names each of the facts as a whole word, in any order."""
    return re.match(naming(*facts), str(text)) is not None


def _whole(fact: str) -> str:
    before = r"(?<![\w.])" if re.match(r"\w", fact) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", fact) else ""
    return f"{before}{re.escape(fact)}{after}"
