"""Tests that the notebooks among the examples run from the first cell to the last, each in its own kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).resolve().parents[2] / "tools" / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(notebook: Any) -> list[str]:
    """Run a notebook, and return the output or the value of each code cell."""
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [
        "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


#: A rank's row of the table, after the rank's last step.
LAST = re.compile(r"^\W*\d\W+300\b", re.MULTILINE)


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["blocking", "population"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem != "population")) for path in NOTEBOOKS],
)
def test_it_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "notebooks must be saved without outputs"
    told = run(notebook)
    if path.stem == "population":
        table, _ = notebook.cells[4].outputs
        assert table.output_type == "display_data" and len(LAST.findall(table.data["text/plain"])) == 4
        assert told[2].count("(") >= 4 and told[3].startswith("frozenset({3}) ") and told[-1] == "tensor([1.])"
    else:
        assert "rank 0 of 1" in told[4] and told[5] == "tensor([1., 1.])" and "<World rank 0 of 1" in told[6]


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_cell_that_fails_is_marked_and_the_next_one_runs() -> None:
    cells = [
        "import asyncdist as ad",
        "with ad.blocking.open_world() as world:\n    world.call(lambda: 1 / 0)",
        "with ad.blocking.open_world() as world:\n    world.safe_point()\nworld.size",
        "async with ad.open_world():\n    ad.blocking.barrier()",
        "ad.blocking.process_world().rank",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(notebook)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
    client.execute()
    kinds = [[output.output_type for output in cell.outputs] for cell in notebook.cells]
    assert kinds == [[], ["error"], ["execute_result"], ["error"], ["execute_result"]]
    assert "asyncdist.barrier" in notebook.cells[3].outputs[0].evalue
