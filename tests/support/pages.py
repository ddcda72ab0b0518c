"""Reads the blocks of README.md, CONTRIBUTING.md and the pages in ``docs``, and the comments before them.

A comment stands directly before its block, and is not visible on the page:

- ``<!-- not run: REASON -->``
- ``<!-- before`` lines of Python ``-->``: definitions that the block needs;
- ``<!-- after`` lines of Python ``-->``: code that runs the block's definitions;
- ``<!-- files: PAGE -->``: the block's commands can use the files of another page;
- ``<!-- varies -->``: the numbers that a command prints are not compared;
- ``<!-- timing -->``: the command need not print the lines, but must not print other lines;
- ``<!-- exit N -->``: the exit code of its last command.

The Python blocks of a page run in order, in one module; a block with a title is a file, and a separate module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(not run|before|after|files|varies|timing|exit)\b:?\s*?\n?(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        place: Page and line of the block, for reports.
        language: Language after the opening fence.
        title: Name of a file, or "".
        text: Content of the block.
        comments: Content of the comments before the block, by their first word.
    """

    place: str
    language: str
    title: str
    text: str
    comments: dict[str, str]

    @property
    def is_run(self) -> bool:
        """Return whether the tests run the block."""
        return "not run" not in self.comments

    def program(self) -> str:
        """Return the program: the block's text; for a diff, the text after the change."""
        if self.language != "diff":
            return self.text
        return "".join(f"{line[2:]}\n" for line in self.text.splitlines() if line[:1] != "-")


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page."""
    text = page.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        comments, language, options, code = block.groups()
        title = re.search(r'title="(.*?)"', options)
        line = text.count("\n", 0, block.start(2)) + 1
        found.append(
            Block(
                f"{page.relative_to(ROOT)}:{line}",
                language,
                title[1] if title else "",
                code,
                dict(_COMMENT.findall(comments)),
            )
        )
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page}: a block is not found"
    return found


def pages_with(*languages: str) -> list[Path]:
    """Return the pages that contain blocks in these languages that are run."""
    return [page for page in PAGES if any(block.language in languages and block.is_run for block in blocks(page))]


def name_of(page: Path) -> str:
    """Return the name of a page in the names of tests."""
    return str(page.relative_to(ROOT))
