"""Tests that the compiled modules match their sources, and that they behave the same compiled and interpreted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.compiled_copy import copied, pretend_to_compile

from asyncdist import compiled


def test_an_edit_of_any_source_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a compiled module must have an effect."""
    monkeypatch.delenv(compiled.PURE_VARIABLE, raising=False)
    (tmp_path / "setup.py").touch()
    copy = copied(tmp_path / "asyncdist")
    pretend_to_compile(copy)
    assert copy.search_path() == [str(copy.folder())]
    assert copy.search_path("transports") == [str(copy.folder() / "transports")]
    assert copy.describe() == "yes"
    for source in sorted(
        [*tmp_path.rglob("wire.*"), *tmp_path.rglob("mailboxes.p*"), *tmp_path.rglob("mpi_requests.p*")]
    ):
        if source.suffix in (".py", ".pxd"):
            text = source.read_text()
            source.write_text(text + "\n")
            assert copy.search_path() == []
            assert "pip install -e ." in copy.describe()
            source.write_text(text)
    assert copy.describe() == "yes"


def test_what_was_compiled_in_part_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiled.PURE_VARIABLE, raising=False)
    copy = copied(tmp_path)
    pretend_to_compile(copy)
    random.choice(list(copy.folder().rglob("*.so"))).unlink()
    assert copy.search_path() == []
    assert "not compiled" in copy.describe()


def test_interpreted_installation_is_not_told_to_compile_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `asyncdist doctor` advised `pip install -e .` without a checkout, and called the sources changed."""
    monkeypatch.delenv(compiled.PURE_VARIABLE, raising=False)
    copy = copied(tmp_path / "asyncdist")
    assert "-e ." not in copy.describe()
    assert "--no-cache-dir" in copy.describe(), "pip must not reuse a wheel that was built without a compiler"


@pytest.mark.parametrize(("value", "wanted"), [("", True), ("0", True), ("1", False), ("yes", False)])
def test_the_environment_can_ask_for_interpreted_modules(
    value: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied(tmp_path)
    pretend_to_compile(copy)
    monkeypatch.setenv(compiled.PURE_VARIABLE, value)
    assert bool(copy.search_path()) is wanted
    assert copy.describe() == ("yes" if wanted else f"no, since {compiled.PURE_VARIABLE}={value}")
