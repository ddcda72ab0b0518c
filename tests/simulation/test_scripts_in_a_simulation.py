"""Tests scripts that use their own process: ``__main__``, standard output, and the current folder."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncdist.simulation import Kill, Restart
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.replay.script import run_command
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.run_script import Script, execute

#: A plain script, which opens its world without a main function.
PLAIN = """
from __future__ import annotations
import pickle, sys, typing
from dataclasses import dataclass
import asyncdist as ad

@dataclass(frozen=True, slots=True)
class Inner:
    number: int

@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner

world = ad.blocking.process_world()
channel = world.channel(Outer, tag=100)
for _ in range(3):
    ad.blocking.barrier()
    assert type(pickle.loads(pickle.dumps(Inner(world.rank)))) is Inner
    assert typing.get_type_hints(Outer)["inner"] is Inner
    assert sys.modules["__main__"].__dict__ is globals()
if world.rank == 1:
    channel.send(Outer(Inner(1)), dest=0)
elif world.rank == 0:
    assert type(channel.receive().message.inner) is Inner
ad.blocking.barrier()
"""
RESTARTED = """
import pickle, sys
import asyncdist as ad

class Own:
    pass

world = ad.blocking.process_world()
for _ in range(10):
    world.sleep(0.02)
    assert type(pickle.loads(pickle.dumps(Own()))) is Own
    assert sys.modules["__main__"].__dict__ is globals()
"""
MAIN = """
import os
import asyncdist as ad

os.chdir("elsewhere")

async def main(world):
    await ad.barrier()
    return os.path.exists(__file__)

if __name__ == "__main__":
    assert ad.run(main), __file__
"""
#: Like MAIN, but each rank runs the whole script.
PLAIN_ELSEWHERE = """
import os
import asyncdist as ad

os.chdir("elsewhere")
world = ad.blocking.process_world()
ad.blocking.barrier()
assert os.path.exists(__file__), __file__
"""
RESTARTED_ELSEWHERE = """
import os
import asyncdist as ad

world = ad.blocking.process_world()
folder = os.path.join(os.path.dirname(__file__), "elsewhere")
if not world.incarnation:
    world.sleep(0.02)
    os.chdir(folder)
for _ in range(10):
    world.sleep(0.02)
    assert os.path.basename(os.getcwd()) == "elsewhere", (world.rank, world.incarnation)
    assert os.path.exists(__file__), __file__
"""
#: Scripts with the blocking functions. The debugger stops at the marked line.
DEBUGGED = {
    "a main": """
import asyncdist as ad

def main(world):
    x = 1  # here
    ad.blocking.barrier()

if __name__ == "__main__":
    ad.blocking.run(main)
""",
    "no main": """
import asyncdist as ad

world = ad.blocking.process_world()
x = 1  # here
ad.blocking.barrier()
""",
}
OUTPUT = """
import faulthandler, sys
import asyncdist as ad

async def main(world):
    await ad.barrier()

if __name__ == "__main__":
    {use}
    ad.run(main)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    before = sys.modules["__main__"]
    yield
    assert sys.modules["__main__"] is before


def simulated(source: str, faults: tuple[Fault, ...] = (), ranks: int = 3) -> SimReport[object]:
    Path("script.py").write_text(source)
    ended = execute(Script("script.py", (), ranks), 3, faults)
    if ended.error is not None:
        raise ended.error
    assert ended.report is not None
    ended.report.check_ranks()
    return ended.report


def test_each_rank_of_a_plain_script_has_its_own_main() -> None:
    """Regression: all ranks had the ``__main__`` of the rank that began last, so pickle and annotations failed."""
    simulated(PLAIN)


def test_a_restarted_rank_of_a_plain_script_has_its_own_main() -> None:
    simulated(RESTARTED, (Kill(1, at_s=0.05), Restart(1, at_s=0.06)))


def test_a_restarted_rank_stays_in_the_folder_of_the_others() -> None:
    """Regression: the new process of a rank changed the folder of all ranks, which share one process."""
    simulated(RESTARTED_ELSEWHERE, (Kill(1, at_s=0.05), Restart(1, at_s=0.06)))


@pytest.mark.parametrize("source", [MAIN, PLAIN_ELSEWHERE])
def test_a_script_may_change_the_current_folder(source: str, tmp_path: Path) -> None:
    """Regression: the path of the script was relative to the folder in which the script had begun."""
    for _ in range(2):
        simulated(source)
        assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("kind", DEBUGGED)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_debugged_replay_stops_in_the_users_code(
    kind: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the debugger stopped in asyncdist's own main, which calls the blocking one or runs the script."""
    Path("script.py").write_text(DEBUGGED[kind])
    execute(Script("script.py", (), 2, record="recorded"), 3, ())
    monkeypatch.setattr("sys.stdin", io.StringIO("p ('rank', world.rank)\nn\np ('x', x)\nc\n"))
    code = run_command("recorded", "script.py", (), job=None, rank=rank, to_test=None)
    out = capsys.readouterr().out
    assert code == 0, out
    stops = re.findall(r"^-> (.*)$|(\('(?:rank|x)', \d\))", out, re.MULTILINE)
    shown = ["".join(each) for each in stops]
    assert shown[:4] == ["x = 1  # here", f"('rank', {rank})", "ad.blocking.barrier()", "('x', 1)"], out


@pytest.mark.parametrize(
    "use",
    [
        "sys.stdout.reconfigure(line_buffering=True)",
        "faulthandler.enable()",
        "sys.stdout.buffer.write(b'x'); sys.stdout.fileno(), sys.stderr.fileno()",
    ],
)
def test_a_scenario_of_a_script_has_files_for_its_output(use: str) -> None:
    """Regression: standard output was an ``io.StringIO``, so that these calls failed in an exploration."""
    Path("script.py").write_text(OUTPUT.format(use=use))
    Script("script.py", (), 2)(1).check_ranks()
