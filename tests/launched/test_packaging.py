"""Tests installations as users make them: each works, is compiled if possible, and does not change the checkout.

The checkouts are copies of the package in which two modules are compiled, since all modules are treated alike. Nothing
is downloaded: setuptools and Cython come from this environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.compiled_copy import TOP, copied, pretend_to_compile

from asyncdist import compiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

FEW_MODULES = ("transports.doorbell", "transports.mpi_requests")  # which a simulation does not use
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
#: A program that uses the installed package: one rank alone, and an average of two simulated ranks.
USED = """
import torch, asyncdist as ad
from asyncdist import compiled
from protocols import AverageAllPolicy

async def main(world):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, world.rank)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters(), 0.1), average_every=1) as policy:
        await policy.step()
    return model.weight.item()

assert ad.simulate(main, ranks=2).results == (0.5, 0.5)
print(compiled.describe(), compiled.__file__)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ModuleType]:
    """Return a copy of all files from which an installation is made, and its ``asyncdist/compiled.py``."""
    monkeypatch.setenv(compiled.PURE_VARIABLE, "")
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("asyncdist", "protocols"):
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("_compiled", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, folder)
    return folder, copied(folder / "asyncdist", FEW_MODULES)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return the output of a command that must succeed."""
    environment = {**os.environ, **variables}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def contents(folder: Path) -> dict[str, str]:
    """Return the checksum of every file of a checkout, without files that setuptools leaves and git ignores."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    left = ("build", "asyncdist.egg-info")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.relative_to(folder).parts[0] not in left
    }


def use(site: Path) -> str:
    """Check that the installed package works, and return whether it is compiled."""
    said = run(sys.executable, "-c", USED, cwd=site.parent, PYTHONPATH=str(site)).strip().splitlines()[-1]
    assert str(site) in said, "the import must use the fresh installation"
    return said


def needs_compiler() -> None:
    if shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no compiler here, or no headers of Python")


@pytest.mark.long
def test_build_makes_a_source_archive_and_a_wheel_from_it(checkout: tuple[Path, ModuleType], tmp_path: Path) -> None:
    needs_compiler()
    folder, copy = checkout
    pretend_to_compile(copy)  # as after an editable installation of this checkout
    before, dist = contents(folder), tmp_path / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, cwd=folder)
    assert contents(folder) == before
    (archive,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    assert "passed" in run(sys.executable, "-m", "twine", "check", "--strict", archive, wheel, cwd=tmp_path).lower()
    run(Path(sys.executable).with_name("check-wheel-contents"), wheel, cwd=folder)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "site")
    assert sum(name.endswith(".so") for name in names) == len(FEW_MODULES)
    wanted = {str(path.relative_to(TOP)) for top in ("asyncdist", "protocols") for path in sources(TOP / top)}
    assert wanted <= set(names), "the wheel must contain all modules"
    with tarfile.open(archive) as packed_sources:
        assert wanted <= {name.partition("/")[2] for name in packed_sources.getnames()}
    assert use(tmp_path / "site").startswith("yes ")


def sources(folder: Path) -> list[Path]:
    """Return the files of a package that are not compiled."""
    paths = [
        path for path in folder.rglob("*") if path.suffix in (".py", ".pyi", ".pxd", ".html") or path.name == "py.typed"
    ]
    return [path for path in paths if "_compiled" not in path.parts]


@pytest.mark.long
def test_pip_installs_a_compiled_package(checkout: tuple[Path, ModuleType], tmp_path: Path) -> None:
    needs_compiler()
    folder, copy = checkout
    pretend_to_compile(copy)
    before, site = contents(folder), tmp_path / "site"
    run(*PIP, "install", "--no-deps", "--no-build-isolation", "--target", site, folder, cwd=tmp_path)
    assert contents(folder) == before
    assert use(site).startswith("yes ")


@pytest.mark.long
def test_a_wheel_has_nothing_of_earlier_builds(checkout: tuple[Path, ModuleType], tmp_path: Path) -> None:
    """Regression: the wheel contained modules that had been deleted since, from the checkout's folder ``build``."""
    folder, _ = checkout
    pure = {compiled.PURE_VARIABLE: "1"}
    gone = folder / "protocols" / "gone.py"
    gone.touch()
    run(sys.executable, "setup.py", "--quiet", "build", cwd=folder, **pure)
    gone.unlink()
    assert list((folder / "build").rglob(gone.name)), "the earlier build must leave no files"
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, folder, cwd=tmp_path, **pure)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert "protocols/policy.py" in names and "protocols/gone.py" not in names


@pytest.mark.long
def test_pip_makes_a_pure_wheel_where_no_compiler_is(checkout: tuple[Path, ModuleType], tmp_path: Path) -> None:
    folder, copy = checkout
    pretend_to_compile(copy)
    before = contents(folder)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, folder, cwd=tmp_path, CC="false")
    assert contents(folder) == before
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "the wheel must not depend on the platform"
    with zipfile.ZipFile(wheel) as packed:
        assert not [name for name in packed.namelist() if name.endswith(".so")]
        packed.extractall(tmp_path / "site")
    assert use(tmp_path / "site").startswith("no, not compiled when this installation was made")
