"""Tests that ``asyncdist.protocols`` and ``protocols`` are the same modules, and the error if a file shadows them."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import pytest

import asyncdist.protocols
import protocols
from asyncdist import rank_program

ROOT = Path(__file__).resolve().parents[2]


def test_both_names_are_those_of_the_same_modules() -> None:
    paths = sorted((ROOT / "protocols").rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert importlib.import_module(name) is importlib.import_module(f"asyncdist.{name}"), name
    assert sys.modules["protocols"] is asyncdist.protocols


def test_classes_are_pickled_by_the_name_that_nothing_hides() -> None:
    rules = protocols.SelectiveRules
    assert rules.__module__ == "asyncdist.protocols.selective.selection"
    assert pickle.loads(pickle.dumps(rules)) is rules
    older = pickle.dumps(rules, protocol=0).replace(b"asyncdist.protocols", b"protocols")
    assert pickle.loads(older) is rules, "a pickle with the former module name must still load"


def test_an_overwritten_package_names_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: another distribution with a top-level ``protocols`` gave a bare ImportError."""
    file = tmp_path / "protocols" / "__init__.py"
    monkeypatch.setattr(rank_program, "PROTOCOLS", file)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "was deleted: pip install --force-reinstall" in str(rank_program.find_overwriting())
    for name, files in (("other", "protocols/__init__.py,,\n"), ("harmless", "harmless.py,,\n")):
        about = tmp_path / f"{name}-1.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (about / "RECORD").write_text(files)
    file.parent.mkdir()
    file.write_text("x = 1\n")
    said = f"{file} of asyncdist was overwritten by the distribution other 1.5: the two cannot be installed together"
    assert str(rank_program.find_overwriting()).startswith(said)
    with pytest.raises(ImportError, match="overwritten by the distribution other"):
        importlib.reload(asyncdist.protocols)
    error = ImportError("cannot import name", name="protocols")
    monkeypatch.delitem(sys.modules, "protocols")
    rank_program.explain_import(error)
    assert error.__notes__[0].startswith(said)
    file.write_text("from asyncdist.protocols.policy import SpawnPolicy\n")
    assert rank_program.find_overwriting() is None
