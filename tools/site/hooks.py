"""MkDocs hooks that turn the checkout's pages into a site: they add pages outside ``docs``, mend links, draw diagrams.

The pages can also be read in the checkout. README.md is the site's front page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: Script that draws diagrams: @mermaid-js/tiny 11.17.2, as published.
DRAWING = "assets/mermaid.tiny.js"
#: Pages of the site whose files are outside ``docs``.
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: Factor by which a page's matches count more in a search. The page has the table of the policies' options.
SEARCH_BOOST = {"policies.md": 8.0}
#: Page of the navigation after which the pages of simple policies, in `docs/simple`, are inserted.
SIMPLE_AFTER = "streaming_diloco.md"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of simple policies to the navigation, with their headings as titles."""
    pages = sorted((ROOT / "docs" / "simple").glob("*.md"))
    added = [{page.read_text().splitlines()[0].lstrip("# "): f"simple/{page.name}"} for page in pages]
    (section,) = (next(iter(each.values())) for each in config.nav or () if SIMPLE_AFTER in str(each))
    place = next(place for place, page in enumerate(section) if SIMPLE_AFTER in str(page))
    section[place + 1 : place + 1] = added
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs`` and the pictures that they show."""
    sources = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for name, page in BESIDE.items():
        sources[name] = (ROOT / name).read_text()
        files.append(File.generated(config, page, content=sources[name]))
    pictures = {
        posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        for name, text in sources.items()
        for is_picture, _, target in _LINK.findall(text)
        if is_picture
    }
    for place in sorted(pictures):
        if not place.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make links point to pages of the site. A link to a file that is not a page becomes plain text."""
    uri: str = page.file.src_uri
    if uri in SEARCH_BOOST:
        page.meta["search"] = {"boost": SEARCH_BOOST[uri]}
    source = {page: name for name, page in BESIDE.items()}.get(uri, f"docs/{uri}")
    return outside_of_code(markdown, lambda text: _LINK.sub(lambda link: _link(link, source, uri), text))


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Add the script that draws diagrams to pages that have one; the theme would load it from another server.

    The script is not in ``extra_javascript``, because every page would then load its 2.5 MB.
    """
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}\n<script src="{posixpath.relpath(DRAWING, posixpath.dirname(page.file.dest_uri) or ".")}"></script>'


def outside_of_code(markdown: str, change: Any) -> str:
    """Apply ``change`` to Markdown outside code fences."""
    parts, at = [], 0
    for code in _FENCED.finditer(markdown):
        parts += [change(markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, change(markdown[at:])])


def _link(link: re.Match[str], source: str, uri: str) -> str:
    mark, text, target = link.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link[0]
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if place in BESIDE:
        where = BESIDE[place]
    elif place.startswith("docs/") and place.endswith((".md", ".png", ".svg")):
        where = place.removeprefix("docs/")
    elif mark:
        where = place
    elif (ROOT / place).exists():
        return text if text.startswith("`") else f"{text} (`{place}`)"
    else:
        return link[0]  # MkDocs reports the broken link
    return f"{mark}[{text}]({posixpath.relpath(where, posixpath.dirname(uri) or '.')}{hash_sign}{anchor})"
