"""What the pages need to be a site: pages that lie elsewhere, links to files that are no pages, and diagrams drawn.

The pages are written to be read in the checkout, too. README.md is the front page of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: What draws diagrams: @mermaid-js/tiny 11.17.2, as its authors build it.
DRAWING = "assets/mermaid.tiny.js"
#: Pages of the site that lie beside ``docs``.
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
#: How much more a page counts in a search than others. The table of the policies' options is there.
SEARCH_BOOST = {"policies.md": 8.0}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside ``docs``, and the pictures that they show."""
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
    """Let links lead to pages of the site. Of a link to another file of the checkout only its text stays."""
    uri: str = page.file.src_uri
    if uri in SEARCH_BOOST:
        page.meta["search"] = {"boost": SEARCH_BOOST[uri]}
    source = {page: name for name, page in BESIDE.items()}.get(uri, f"docs/{uri}")
    return outside_of_code(markdown, lambda text: _LINK.sub(lambda link: _link(link, source, uri), text))


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Let a page with diagrams have what draws them: the theme would fetch it from elsewhere.

    It is not in ``extra_javascript``, for every page would read its 2.5 MB.
    """
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}\n<script src="{posixpath.relpath(DRAWING, posixpath.dirname(page.file.dest_uri) or ".")}"></script>'


def outside_of_code(markdown: str, change: Any) -> str:
    """Change all but what is between fences."""
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
        return link[0]  # MkDocs says that it leads nowhere
    return f"{mark}[{text}]({posixpath.relpath(where, posixpath.dirname(uri) or '.')}{hash_sign}{anchor})"
