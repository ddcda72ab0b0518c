"""Tests how ``asyncdist replay`` separates its own arguments from those of the script."""

from __future__ import annotations

import pytest

from asyncdist import cli


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
