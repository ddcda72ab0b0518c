"""Tests the documentation as a site: it is built with --strict, its links have targets, and it needs no network."""

from __future__ import annotations

import html.parser
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest
from support.pages import PAGES, blocks

ROOT = Path(__file__).parents[2]
#: Elements that make a browser fetch the attribute's address without a click.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(html.parser.HTMLParser):
    """The ids, links, fetched addresses and text of a page, the text without blocks of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self._open_blocks = 0
        self.feed(path.read_text())

    def handle_data(self, data: str) -> None:
        if not self._open_blocks:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._open_blocks -= tag == "pre"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._open_blocks += tag == "pre"
        self.ids |= {given[name] or "" for name in ("id", "name") if name in given}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if tag in FETCHED and given.get(FETCHED[tag]) and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(given[FETCHED[tag]] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Without --quiet, which would hide warnings from --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.timeout(600)
def test_every_link_and_anchor_leads_somewhere(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if re.match(r"\w+:", target):
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            if not there.is_file() or (anchor and there in pages and unquote(anchor) not in pages[there].ids):
                broken.append(f"{path.name}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


@pytest.mark.timeout(600)
def test_nothing_is_fetched_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for fetched in page.fetched:
            assert not re.match(r"\w+:|//", fetched), f"{path.name} fetches {fetched} from another site"
            assert (path.parent / urldefrag(fetched)[0]).is_file(), (
                f"{path.name} fetches {fetched}, which does not exist"
            )
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:|//)[^)]*", style.read_text()) == [], style.name


@pytest.mark.timeout(600)
def test_every_diagram_is_drawn_by_what_the_site_has_itself(site: Path, pages: dict[Path, Page]) -> None:
    """The theme draws elements ``pre.mermaid``, and fetches mermaid from another host if no script defines it."""
    written = sum(block.language == "mermaid" for page in PAGES for block in blocks(page))
    drawn = 0
    for path, page in pages.items():
        text = path.read_text()
        here = text.count('<pre class="mermaid"><code>')
        own = [index for index, name in enumerate(page.fetched) if name.endswith("assets/mermaid.tiny.js")]
        assert len(own) == bool(here), f"{path.name} has {here} diagrams, and loads another number of scripts for them"
        bundle = next(index for index, name in enumerate(page.fetched) if "/bundle." in name)
        assert not own or own[0] < bundle, f"{path.name}: the theme must be loaded before the bundle"
        drawn += here
    assert drawn == written > 5
    assert (site / "assets" / "mermaid.tiny.js").read_text().rstrip().endswith(".default;"), (
        "the script must end with a default export"
    )
    assert (site / "assets" / "mermaid.LICENSE.txt").is_file()


def test_the_configuration_names_no_other_host() -> None:
    """Fetched addresses are tested above; this test finds hosts from which a script of the page would fetch later."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.findall(r"^ *[^#\n]*\w+://[^\n]*", config, re.MULTILINE) == []
    for script in (ROOT / "docs" / "assets").glob("*.js"):
        assert not re.findall(r"(?:import\(|fetch\(|src ?= ?)[\"'`]https?:", script.read_text()), script.name


@pytest.mark.timeout(600)
def test_no_markup_is_left_in_the_text(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        left = re.findall(
            r"\[[\w.`]+\]\[[\w.]*\]|:(?:class|func|meth|mod|attr|exc|data|obj):`|^::: .*", page.text, re.MULTILINE
        )
        assert left == [], path.name


@pytest.mark.timeout(600)
def test_what_is_called_a_module_is_one(pages: dict[Path, Page]) -> None:
    """A function may have the name of its module, such as ``asyncdist.simulation.replay``."""
    heading = re.compile(r'id="([\w.]+)" class="doc doc-heading">\s*<code class="doc-symbol [\w -]*?doc-symbol-(\w+)"')
    seen = dict(pair for path in pages if path.parent.name == "api" for pair in heading.findall(path.read_text()))
    assert seen["asyncdist.simulation.replay"] == seen["asyncdist.blocking.process_world"] == "function"
    modules = {name for name, kind in seen.items() if kind == "module"}
    public = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    assert public <= seen.keys()
    for name in sorted(public):
        owner, _, last = name.rpartition(".")
        is_module = isinstance(getattr(importlib.import_module(owner), last, None), ModuleType | None)
        assert is_module == (name in modules), name
