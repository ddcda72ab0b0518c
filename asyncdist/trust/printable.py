"""Makes strings that another process or a file supplied safe to print on a terminal.

A terminal obeys control characters: an escape sequence can clear the screen, set the window's title or hide text.
Characters that change the direction of text make a line read as another one. Only the standard library is imported.
"""

from __future__ import annotations

import unicodedata
from typing import Final

#: Unicode categories of characters that are not drawn: control, format, surrogate, line and paragraph separators.
_UNPRINTABLE: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the string with each character that is not drawn written as its escape, as in ``\x1b``.

    Args:
        text: Any string.
        keep: Characters that stay as they are, for example ``"\n"`` for a text of several lines.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(each) if _is_unprintable(each) and each not in keep else each for each in text)


def _is_unprintable(character: str) -> bool:
    return unicodedata.category(character) in _UNPRINTABLE


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
