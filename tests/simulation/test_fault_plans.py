"""Tests fault plans as text, as ``asyncdist sim --faults`` reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asyncdist.simulation import (
    Corrupt,
    Delay,
    Fault,
    Interrupt,
    Join,
    Kill,
    Partition,
    Restart,
    SlowLink,
    SlowRank,
    Stall,
)
from asyncdist.simulation.exploration.repro_command import ScriptError, format_faults, read_faults

PLAN: tuple[Fault, ...] = (
    Kill(1, at_s=0.5),
    Kill(1, at_turn=3),
    Restart(1, at_s=1.0),
    Join(0, at_s=0.25),
    Interrupt(1, 0.5, "SIGINT"),
    Stall(0, 0.25, 2.0),
    SlowRank(1, 0.0, 3.0),
    SlowLink(0, 1, 1.0, 10.0),
    Partition((0,), 1.0, 2.0),
    Delay(0, 1, 2, 0.5),
    Corrupt(1, 0, 3, 7),
)


def test_a_plan_is_read_from_a_file_or_from_the_command_line(tmp_path: Path) -> None:
    text = format_faults(PLAN)
    assert json.loads(text)[0] == {"kind": "Kill", "rank": 1, "at_s": 0.5}
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert read_faults(text, ranks=2) == read_faults(str(file), ranks=2) == PLAN
    assert {type(fault) for fault in PLAN} == set(Fault.__args__), "PLAN must have all kinds of faults"


def test_the_docs_list_each_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text()
    assert [kind.__name__ for kind in Fault.__args__ if not re.search(rf"^\|.*`{kind.__name__}`.*\|", text, re.M)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{", "the fault plan is not valid JSON: Input data was truncated"),
        ("[3]", 'fault 1 of the fault plan must be like {"kind": "Kill"'),
        ('{"kind": "Kill", "rank": 1}', "the fault plan must be a list of faults, got dict"),
        (
            '[{"rank": 1}]',
            f"fault 1 of the fault plan: kind must be one of {min(kind.__name__ for kind in Fault.__args__)}, ",
        ),
        ('[{"kind": "Kil"}]', "'Kil'"),
        ('[{"kind": ["Kill"]}]', "['Kill']"),
        (
            '[{"kind": "Kill", "rank": 1, "at": 2}]',
            "a field of Kill must be one of rank, at_s, at_turn, at_message, got 'at'",
        ),
        ('[{"kind": "Kill", "at_s": 1}]', "fault 1 of the fault plan, Kill: Object missing required field `rank`"),
        ('[{"kind": "Kill", "rank": "1", "at_s": 1}]', "Expected `int`, got `str` - at `$.rank`"),
        ('[{"kind": "Kill", "rank": 1}]', "at_s, at_turn and at_message"),
        ('[{"kind": "Kill", "rank": 2, "at_s": 1}]', "rank 2"),
        ('[{"kind": "Stall", "rank": 1, "at_s": -1, "duration_s": 1}]', "at_s"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ScriptError) as caught:
        read_faults(text, ranks=2)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
