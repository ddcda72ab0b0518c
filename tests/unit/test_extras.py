"""Tests that the error for a missing optional library names the extra that installs it."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
from support.facts import names

from asyncdist import validation

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("module", "library", "package", "extra"),
    [
        ("asyncdist.integrations.accelerate", "accelerate", "accelerate", "accelerate"),
        ("asyncdist.integrations.lightning", "lightning", "lightning", "lightning"),
        ("asyncdist.integrations.transformers", "transformers", "transformers", "transformers"),
        ("asyncdist.integrations.transformers", "accelerate", "accelerate", "transformers"),
    ],
)
def test_an_integration_names_the_extra_that_it_needs(
    module: str, library: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a missing library raised a bare "No module named"."""
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    for loaded in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, loaded)  # "from LIBRARY.module import" would find it
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(module)
    assert names(raised.value, module, library, f"asyncdist[{extra}]")
    assert any(requirement.startswith(package) for requirement in EXTRAS[extra])


def test_a_library_without_its_own_needs_is_not_called_missing() -> None:
    imports = validation.optional_imports("this", ["lightning"], "lightning")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'of_that_library'$"), imports:
        importlib.import_module("of_that_library")
