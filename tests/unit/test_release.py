"""Tests the files and settings of a release, as far as possible without building one."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def described(readme: str) -> str:
    """Return the description that setup.py makes from a readme."""
    spec = importlib.util.spec_from_file_location("setup_of_release", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.long_description(readme)
    return text


def test_the_description_has_no_links_into_the_checkout() -> None:
    """Regression: the readme's pictures and links were broken outside the checkout."""
    readme = "A [page](docs/page.md#part), [out](https://a.b/c) [here](#top)\n"
    assert described(readme).startswith("A page, [out](https://a.b/c) [here](#top)\n")
    whole = described("before\n\n![a picture](docs/x.png)\n\nafter\n")
    assert whole.startswith("before\n\nafter\n")
    assert not re.findall(r"\]\((?!https?://|#)", described((ROOT / "README.md").read_text()))


def test_all_that_ranges_allow_has_a_lowest_version() -> None:
    """``./tools/test --oldest`` needs the lowest version of each package."""
    project = PROJECT["project"]
    optional = (line for lines in project["optional-dependencies"].values() for line in lines)
    for line in (*project["dependencies"], *optional):
        assert re.match(r"[\w.\-]+(\[\w+\])?>=[\d.]+", line), line


def test_the_release_names_its_authors_and_builds_each_python() -> None:
    project = PROJECT["project"]
    assert project["authors"] and project["keywords"]
    minors = [line.rpartition(".")[2] for line in project["classifiers"] if ":: 3." in line]
    assert minors == [re.search(r"cp3(\d+)-manylinux_x86", build)[1] for build in _builds()]  # type: ignore[index]


def _builds() -> list[str]:
    builds: str = PROJECT["tool"]["cibuildwheel"]["build"]
    return [build for build in builds.split() if "x86" in build]
