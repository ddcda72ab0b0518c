"""Tests how ``asyncdist replay`` separates its own arguments from the script's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncdist import cli
from asyncdist.simulation.processes.debugger import RankDebugger


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "nowhere", "--rank", "1", "script.py"],
        ["replay", "nowhere", "script.py", "--rank", "1"],
        ["replay", "--rank", "1", "nowhere", "script.py", "an argument"],
    ],
)
def test_options_may_stand_between_the_folder_and_the_script(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "asyncdist replay: --rank needs --pdb\n"


def test_a_test_is_written_without_the_debugger(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", "nowhere", "--to-test", "test_it.py", "--pdb"])
    assert ended.value.code == 2
    assert "--pdb and --to-test exclude each other" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("is_of_other", [False, True])
def test_pdb_executes_no_pdbrc_of_another_user(
    is_of_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: replay --pdb in a shared folder executed commands of the user who had put a file there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".pdbrc").write_text("import os\n")
    os.chown(tmp_path / ".pdbrc", 4242 if is_of_other else os.getuid(), -1)
    debugger = RankDebugger(0)
    assert ("import os" in map(str.strip, debugger.rcLines)) == (not is_of_other)
    assert ("belongs to another user" in capsys.readouterr().out) == is_of_other
