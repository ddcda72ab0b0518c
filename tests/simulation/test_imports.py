"""Tests that importing asyncdist is cheap, and that every public name is where the type checker finds it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import asyncdist

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"mpi4py", "msgspec", "numpy", "torch", "uvloop"}


def fresh(code: str) -> str:
    """Return the output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.workers
@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("asyncdist", ""),
        ("asyncdist.cli", ""),
        ("asyncdist.pytest_plugin", ""),
        ("asyncdist", "import asyncio; asyncio.run(asyncdist.progress().__aenter__())"),
    ],
    ids=["asyncdist", "cli", "pytest_plugin", "progress"],
)
def test_nothing_heavy_is_imported_before_it_is_used(module: str, use: str) -> None:
    loaded = set(fresh(f"import {module}, sys; {use}\nprint(*sys.modules)").split())
    assert module in loaded and not loaded & HEAVY


@pytest.mark.workers
def test_help_imports_only_what_it_prints() -> None:
    """No torch, no asyncio, and none of the modules with which commands do their work."""
    said = fresh(
        "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"
        "from asyncdist import cli; cli.main(['--help'])"
    )
    loaded = set(said.splitlines()[-1].split())
    assert "show this help message" in said and "argparse" in loaded
    assert not loaded & (HEAVY | {"asyncio", "concurrent.futures", "hashlib", "importlib.metadata", "multiprocessing"})
    # These declare the arguments of `run`, and import nothing heavy.
    declaring = {
        "asyncdist.launch",
        "asyncdist.launch.run_command",
        "asyncdist.launchers",
        "asyncdist.launchers.backends",
    }
    assert not {name for name in loaded - declaring if name.startswith(("asyncdist.launch", "asyncdist.environment"))}


@pytest.mark.workers
@pytest.mark.long
def test_the_first_use_imports_what_it_needs() -> None:
    """This is the counterpart of the test above: it shows that the imports would be noticed."""
    loaded = set(fresh("import asyncdist, sys; asyncdist.run; print(*sys.modules)").split())
    assert {"torch", "asyncdist.runtime.run"} <= loaded


def test_every_name_is_what_the_type_checker_takes_it_for() -> None:
    """A type checker reads the stub, an interpreter calls ``__getattr__``: both must agree on all names."""
    tree = ast.parse(Path(asyncdist.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert homes.keys() == set(asyncdist.__all__) and len(asyncdist.__all__) == len(homes) > 80
    for name, module in homes.items():
        wanted = f"asyncdist.{module or name}"
        found = importlib.import_module(wanted)
        assert getattr(asyncdist, name) is (found if module is None else getattr(found, name)), name


@pytest.mark.workers
def test_names_submodules_and_dir_in_a_fresh_interpreter() -> None:
    seen = fresh(
        "import asyncdist as ad\n"
        "assert set(ad.__all__) <= set(dir(ad)) and sorted(dir(ad)) == dir(ad)\n"
        "print(ad.simulation.Kill.__name__, ad.errors.__name__, ad.World.__module__, hasattr(ad, 'rnu'))\n"
        "from asyncdist import *\n"
        "print(run is ad.run, simulate is ad.simulate, all(name in globals() for name in ad.__all__))\n"
        "try:\n    from asyncdist import rnu\n"
        "except ImportError as error:\n    print(error.name, error.msg.partition(' (')[0])\n"
    )
    assert seen.splitlines() == [
        "Kill asyncdist.errors asyncdist.runtime.world False",
        "True True True",
        "asyncdist cannot import name 'rnu' from 'asyncdist'",
    ]


@pytest.mark.workers
def test_a_session_that_simulates_nothing_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_light(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("asyncdist")
            assert not {HEAVY!r} & set(sys.modules)
        """
    )
    # Only its own plugins, because others may import anything.
    result = pytester.run(sys.executable, "-c", "import os, sys; os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'; "
                          "import pytest; sys.exit(pytest.main(['-p', 'asyncdist']))")  # fmt: skip
    result.assert_outcomes(passed=1)
