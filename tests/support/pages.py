"""The blocks of README.md, CONTRIBUTING.md and the pages in ``docs``, with what comments before them tell the tests.

A comment stands directly before its block, and is not shown:

- ``<!-- not run: REASON -->``
- ``<!-- before`` lines of Python ``-->``: what the block takes from elsewhere;
- ``<!-- after`` lines of Python ``-->``: how what it defines is run;
- ``<!-- files: PAGE -->``: its commands are given the files of another page;
- ``<!-- varies -->``: of what a command prints the numbers are not compared;
- ``<!-- timing -->``: nor whether it prints it, only that it prints nothing else;
- ``<!-- exit N -->``: the exit code of its last command.

Blocks of Python of one page run in its order, in one module; one with a title is a file, and a module of its own.
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
        place: its page and line, for reports.
        language: as after its first fence.
        title: the name of a file, or "".
        text: what it holds.
        comments: what the comments before it say, by their first word.
    """

    place: str
    language: str
    title: str
    text: str
    comments: dict[str, str]

    @property
    def is_run(self) -> bool:
        """Whether it can be."""
        return "not run" not in self.comments

    def program(self) -> str:
        """Its text; of a difference, the text after the change."""
        if self.language != "diff":
            return self.text
        return "".join(f"{line[2:]}\n" for line in self.text.splitlines() if line[:1] != "-")


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
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
    """The pages that have such blocks which are run."""
    return [page for page in PAGES if any(block.language in languages and block.is_run for block in blocks(page))]


def name_of(page: Path) -> str:
    """The page as tests are called by it."""
    return str(page.relative_to(ROOT))
