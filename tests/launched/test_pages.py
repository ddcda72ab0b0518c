"""Tests that the commands in README.md and ``docs`` print the output that the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, pages, torchrun, warm

from asyncdist.launch.mpirun import ROOT_VARIABLES

FILES = {"python", "diff"}
#: Pages whose output has its own tests, of the same policies, libraries, benchmarks and commands.
LONG = {
    f"docs/{name}.md"
    for name in (
        "diloco",
        "figures",
        "integrations",
        "population_training",
        "protocols",
        "recording",
        "replaying",
        "tutorial",
        "worlds",
    )
}


@pytest.mark.mpi
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if pages.name_of(page) in LONG else [], id=pages.name_of(page))
        for page in pages.pages_with("console")
    ],
)
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    for block in pages.blocks(page):
        others = block.comments.get("files", "").strip()
        for given in [block, *(pages.blocks(pages.ROOT / others) if others else ())]:
            if given.title and given.language in FILES:
                (tmp_path / given.title).write_text(given.program())
        if block.language == "console" and block.is_run:
            check(block, tmp_path)


def check(block: pages.Block, folder: Path) -> None:
    """Run the commands of a block; each must print the lines that follow it."""
    shown: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            shown.append((line[2:], []))
        else:
            shown[-1][1].append(line)
    codes = []
    for command, lines in shown:
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        codes.append(ended.returncode)
        stdout = torchrun.without_gloo(ended.stdout)
        said = (stdout + ended.stderr).replace(str(folder), "/home/you")
        is_loose = bool({"varies", "timing"} & block.comments.keys())
        printed = {comparable(line, is_loose) for line in said.splitlines()}
        known = {comparable(line, is_loose) for line in lines if line.strip() != "..."}
        if "timing" in block.comments:
            printed, known = known, {comparable(line, is_loose) for line in stdout.splitlines()}
        assert known <= printed, f"{block.place}: {known - printed} is missing; {command} printed\n{said}"
    assert codes == [0] * (len(codes) - 1) + [int(block.comments.get("exit", "0"))], f"{block.place}\n{said}"


def comparable(line: str, is_loose: bool) -> str:
    """Return a line without the parts that differ between machines: a digest, and for variable output all numbers."""
    line = line.replace(f"{sys.executable} -m asyncdist", "asyncdist").rstrip()
    line = re.sub(r"\b[0-9a-f]{32}\b", "DIGEST", line)
    if not is_loose:
        return line
    line = re.sub(r"^job \w+: (\d+ ranks), .*", r"job: \1", line)  # the host, its MPI and the time differ
    line = re.sub(r" {2,}", "  ", re.sub(r"\d+(\.\d+)?(e-\d+)?", "N", line))  # columns are as wide as their numbers
    return re.sub(r"ranks? N(, N)*", "ranks N", re.sub(r"steps?\b", "steps", line))


def environment() -> dict[str, str]:
    """Return the shell's environment, with this environment's commands first; ranks start warm."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    as_root = dict.fromkeys(ROOT_VARIABLES, "1")  # a plain mpirun of Open MPI refuses root
    return warm.environment({**mpi.base_environment(), **as_root, "PATH": path}, *warm.LIBRARIES)
