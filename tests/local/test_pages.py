"""Tests that the documentation's examples run: every Python and YAML block, and every diff."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import yaml
from support import pages
from support.tokens import tokens_for

import asyncdist as ad
import protocols
from protocols import AsyncSelectiveAveragingPolicy, DiLoCoPolicy, OneSidedSelectiveAveragingPolicy

#: What every block may use without an import, as the pages say.
PRELUDE = "from dataclasses import dataclass\nimport torch\nimport asyncdist as ad\n"
#: Languages whose blocks are for people, and those that other tests run.
OTHERS = {"console", "mermaid", "text"}


def test_every_block_is_run_or_says_why_not() -> None:
    everything = [block for page in pages.PAGES for block in pages.blocks(page)]
    assert {block.language for block in everything} <= {"python", "diff", "yaml", *OTHERS}
    untold = [block.place for block in everything if len(block.comments.get("not run", "a reason")) < 8]
    assert not untold
    programs = [block for block in everything if block.language in ("python", "diff")]
    assert len(programs) > 20
    assert sum(not block.is_run and not is_run_by_a_test(block) for block in programs) <= 1


def test_a_comment_for_a_block_stands_before_it() -> None:
    """Regression: the programs of four pages were never run, because the comments that run them stood after them."""
    for page in pages.PAGES:
        without = re.sub(r"(?:^<!--(?:(?!-->).)*-->\n)+(?=```)", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        left = re.findall(r"^<!-- (?:after|before)\b", without, flags=re.MULTILINE)
        assert not left, f"{page.name}: {len(left)} comments without a block"


def test_links_to_other_hosts_are_sound() -> None:
    """One form for each, and none to the page of a package in a registry: a project has a page of its own."""
    found = [
        (page.name, link)
        for page in pages.PAGES
        for link in re.findall(r"(?:https?|ftp)://[^\s<>\"'`|]+", without_code(page.read_text()))
    ]
    assert len(found) > 5
    for page, text in found:
        link = urlsplit(text.rstrip(").,;"))
        assert link.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", link.netloc), f"{page}: {text}"
        assert not re.match(r"/(?:projects?|packages?|simple)/", link.path), f"{page}: {text}"
    links = {text.rstrip(").,;") for _, text in found}
    assert len({re.sub(r"^https://(www\.)?|(/|\.git)$", "", link).lower() for link in links}) == len(links), sorted(
        links
    )


def test_a_cell_of_a_table_is_short() -> None:
    """Longer text belongs below a heading. Code does not count, and a link counts as its text."""
    found = 0
    for page in sorted((pages.ROOT / "docs").rglob("*.md")):
        if page.name in ("architecture.md", "policy_designs.md"):  # they are read as a whole
            continue
        for row in re.findall(r"^\|.*\|$", without_code(page.read_text()), re.MULTILINE):
            for cell in row.strip("|").split("|"):
                assert len(re.sub(r"\]\([^)]*\)", "]", cell).split()) <= 16, f"{page.name}: {cell.strip()}"
                found += 1
    assert found > 1000


def is_run_by_a_test(block: pages.Block) -> bool:
    """Return whether the reason for which a block is not run here names the test that runs it elsewhere."""
    found = re.search(r"tests/launched/\w+\.py runs it", block.comments.get("not run", ""))
    return found is not None and (pages.ROOT / found[0].removesuffix(" runs it")).is_file()


def without_code(text: str) -> str:
    """Return a page without its code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.pages_with("python"), ids=pages.name_of)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "asyncdist.integrations.torchgfn" in page.read_text():
        pytest.importorskip("gfn", reason="torchgfn is not installed")
    monkeypatch.chdir(tmp_path)
    shared = module("page")
    for block in pages.blocks(page):
        if block.language != "python" or not block.is_run:
            continue
        here = module(Path(block.title).stem) if block.title else shared
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        for text in (block.comments.get("before", ""), block.text, block.comments.get("after", "")):
            where = str(tmp_path / block.title) if block.title and text is block.text else block.place
            exec(compile(text, where, "exec"), vars(here))
        vars(shared).update(vars(here))


def module(name: str) -> types.ModuleType:
    """A module in which dataclasses find their annotations."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    exec(PRELUDE, vars(made))
    return made


@pytest.mark.parametrize("page", pages.pages_with("diff"), ids=pages.name_of)
def test_a_difference_is_an_import_and_two_lines_at_most(page: Path) -> None:
    """Further lines are allowed for a replica's process group or mesh, and for a program that resumes."""
    for block in pages.blocks(page):
        if block.language == "diff":
            lines = block.text.splitlines()
            added = [line for line in lines if line.startswith("+") and " import " not in line]
            resuming = 4 * ("register_for_checkpointing" in block.text)
            assert len(added) <= 2 + resuming + any("group" in line or "mesh" in line for line in added), block.place
            compile(block.program(), block.place, "exec")
            before = "".join(f"{line[2:]}\n" for line in lines if line[:1] != "+")
            compile(before, block.place, "exec")


def test_the_lists_of_options_are_those_of_the_policies() -> None:
    """Regression: the page listed options for the one-sided policy that only the selective policy has."""
    page = (pages.ROOT / "docs" / "policies.md").read_text()
    rounds = section(page, "## Selective averaging")
    assert options_of(rounds) == options_in_signature(AsyncSelectiveAveragingPolicy)
    for policy, title in ((OneSidedSelectiveAveragingPolicy, "Without a coordinator"), (DiLoCoPolicy, "DiLoCo")):
        own = section(page, f"## {title}")
        shared = set(re.findall(r"`(\w+)`", own.partition("shares these options")[2].partition("Its own options")[0]))
        assert {*options_of(own), *shared} == options_in_signature(policy), policy.__name__
        assert shared < options_of(rounds) and not shared & options_of(own)


def options_in_signature(policy: type) -> set[str]:
    return inspect.signature(policy).parameters.keys() - {"model", "optimizer"}


def section(page: str, title: str) -> str:
    return page.partition(f"\n{title}\n")[2].partition("\n## ")[0]


def options_of(text: str) -> set[str]:
    """The options that its lists name."""
    return set(re.findall(r"^- `(\w+)` \(", text, re.MULTILINE))


async def use(world: ad.World, text: str) -> int:
    """Train on a policy, given as Python text, for one round of ``average_every`` steps and return the averages."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    names = {**vars(protocols), "partial": functools.partial, "SGD": torch.optim.SGD}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    async with eval(text, {**names, "model": model, "optimizer": optimizer}) as policy:
        for _ in range(policy.average_every):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            await policy.step(tokens=tokens_for(policy, world.rank + 1))
        return int(policy.statistics().average_count)


@pytest.mark.slow
def test_policies_in_the_table_of_methods_run() -> None:
    page = (pages.ROOT / "docs" / "diloco.md").read_text()
    rows = re.findall(r"^\| ([\w -]+) \| `(DiLoCoPolicy\(.*?\))` \|", page, re.MULTILINE)
    assert len(rows) == 12
    for method, text in rows:
        ranks = 1 if method == "Lookahead" else 2
        counts = ad.run_local(use, text, ranks=ranks, strict=True)
        assert counts == [{"post-local SGD": 16, "Streaming DiLoCo": 3}.get(method, 1)] * ranks, method


def test_models_of_the_integrations_begin_equal() -> None:
    """Regression: the programs set no seed, so that copies of them averaged unrelated weights."""
    found = [block for block in pages.blocks(pages.ROOT / "docs" / "integrations.md") if block.language == "diff"]
    assert len(found) >= 11
    for block in found:
        text = block.program()
        made = re.search(r"^model = torch\.nn\.Linear\(|^module = Module\(|\bModel\(\), ", text, re.MULTILINE)
        assert made is not None and "\ntorch.manual_seed(0)" in text[: made.start()], block.place


@pytest.mark.parametrize("page", pages.pages_with("yaml"), ids=pages.name_of)
def test_a_manifest_is_yaml(page: Path) -> None:
    for block in pages.blocks(page):
        if block.language == "yaml":
            assert all(isinstance(part, dict) for part in yaml.safe_load_all(inspect.cleandoc(block.text)))
