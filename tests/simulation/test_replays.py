"""Tests replays of recordings of simulated ranks, and the reports of replays that cannot be equal."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import errno
import operator
import os
import random
import runpy
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncdist as ad
from asyncdist.recording.events import Event
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.simulation import (
    DivergenceError,
    Kill,
    Link,
    Network,
    Restart,
    Uniform,
    replay,
    replay_script,
    simulate,
    transport as sim_transport,
)
from asyncdist.simulation.exploration.repro_command import ScriptError
from asyncdist.simulation.replay import script as replay_scripts
from asyncdist.simulation.replay.script import run_command
from asyncdist.tags import COLLECTIVE_FIRST, CONTROL
from protocols import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy
from simulation.edited_records import Word, edit_headers, keep_events

STEPS = 30


async def train(world: ad.World, bias: float = 0.0, steps: int = STEPS) -> float:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=3, replacement_ratio=0.5) as policy:
        for _ in range(steps):
            with torch.no_grad():
                model.weight += torch.randn(2, 3)
            await policy.step(random.random() + bias * world.rank)
    return model.weight.sum().item()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_decide_as_they_did_and_have_the_same_weights(tmp_path: Path, seed: int) -> None:
    recorded = simulate(train, ranks=4, seed=seed, record=tmp_path)
    replayed = replay(train, recording=read_recording(tmp_path))
    assert replayed.report.results == recorded.results
    assert replayed.decision_count > 50
    assert (replayed.left_count, replayed.cut_ranks) == (0, ())


@pytest.mark.parametrize("seed", [4, 7, 10])
def test_sends_that_complete_late_are_not_counted_as_waits(tmp_path: Path, seed: int) -> None:
    """Regression: all sends complete at once in a replay, so messages after such a wait arrived too late."""
    recorded = simulate(train, ranks=4, seed=seed, record=tmp_path, network=Network(eager_nbytes=0))
    assert replay(train, recording=read_recording(tmp_path)).report.results == recorded.results


async def waits_a_little(world: ad.World) -> float:
    """Receive from the previous rank with a timeout that sometimes passes, after a start for which rank 1 is late."""
    if world.rank == 1:
        await world.sleep(2.5)
    channel, heard = world.channel(Word, tag=40), 0.0
    model = torch.nn.Linear(3, 2)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=3) as policy:
        for number in range(20):
            await world.sleep(random.random() / 100)
            await channel.send(Word(number), (world.rank + 1) % world.size)
            with contextlib.suppress(TimeoutError):
                heard += (await channel.receive(timeout_s=0.004)).message.number * (number + 1)
            await policy.step()
    await ad.barrier()
    return heard


@pytest.mark.parametrize("seed", range(4))
def test_timers_and_deadlines_are_over_when_they_were(tmp_path: Path, seed: int) -> None:
    recorded = simulate(waits_a_little, ranks=4, seed=seed, record=tmp_path)
    recording = read_recording(tmp_path)
    kinds = Counter(event.kind for each in recording.ranks for event in each.events())
    assert kinds["timer"] >= 3, "the other ranks must have logged at least twice that rank 1 was late"
    assert kinds["deadline"] >= 3
    assert replay(waits_a_little, recording=recording).report.results == recorded.results


def test_the_first_difference_is_told(tmp_path: Path) -> None:
    simulate(train, ranks=3, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    with pytest.raises(DivergenceError, match=r"rank [12], .*\[metric policy 0, iteration 2, value "):
        replay(train, 1e-3, recording=recording)
    with pytest.raises(DivergenceError, match=r"rank [012], after iteration 27: the recording has .* but"):
        replay(train, 0.0, STEPS - 2, recording=recording)
    with pytest.raises(DivergenceError, match=r"rank [012]"):
        replay(train, 0.0, STEPS + 6, recording=recording)


def test_a_recording_that_was_cut_short_ends_and_says_so(tmp_path: Path) -> None:
    simulate(train, ranks=4, seed=1, record=tmp_path)
    cut = read_recording(tmp_path).ranks[2]
    half = sum(1 for _ in cut.events()) // 2
    count = 0

    def is_early(event: Event) -> bool:
        nonlocal count
        count += 1
        return count < half

    keep_events(cut, is_early)
    replayed = replay(train, recording=read_recording(tmp_path))
    assert replayed.cut_ranks == (2,)
    assert replayed.decision_count > 30 and replayed.left_count > 10


def test_what_is_wrong_with_a_recording_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a replay reported it a second time, and asyncdist replay a third time."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncdist as ad\n\nasync def main(world):\n    await ad.barrier()\n\n"
        f"ad.simulate(main, ranks=2, seed=1, record={str(tmp_path / 'run')!r})\n"
    )
    runpy.run_path(str(script), run_name="__main__")
    script.write_text(script.read_text().replace("ad.simulate(main", "ad.run(main").replace(", ranks=2, seed=1", ""))
    path = read_recording(tmp_path / "run").ranks[0].path
    path.write_bytes(path.read_bytes()[:-10])
    caplog.clear()
    replay_script(tmp_path / "run", script)
    assert sum(path.name in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("kept_count", [2, 8, 14])
def test_a_rank_does_nothing_more_where_its_record_ends(tmp_path: Path, kept_count: int) -> None:
    """Regression: its timers fired forever, and others took its repeated requests for answers."""
    simulate(waits_a_little, ranks=4, seed=1, record=tmp_path)
    cut = read_recording(tmp_path).ranks[0]
    kept = [event for _, event in zip(range(kept_count), cut.events(), strict=False)]
    keep_events(cut, lambda event: False, *kept)
    replayed = replay(waits_a_little, recording=read_recording(tmp_path))
    assert replayed.cut_ranks == (0,)
    assert replayed.report.virtual_time_s < 1000.0


def test_what_does_not_come_any_more_is_told_in_words(tmp_path: Path) -> None:
    async def waits(world: ad.World, speaker: int) -> None:
        channel = world.channel(Word, tag=40)
        if world.rank == speaker:
            await channel.send(Word(1), 1 - speaker)
        if world.rank == 1:
            await channel.receive()

    simulate(waits, 0, ranks=2, seed=0, record=tmp_path)
    with pytest.raises(
        DivergenceError,
        match="rank 1, before its first step: the recording expects a message of rank 0 on tag 40 next, but none",
    ):
        replay(waits, 5, recording=read_recording(tmp_path))


def test_one_who_fails_fails_again(tmp_path: Path) -> None:
    async def fails(world: ad.World) -> float:
        result = await train(world)
        if world.rank == 1:
            raise ValueError("as planned")
        await asyncio.sleep(0)
        return result

    simulate(fails, ranks=3, seed=2, record=tmp_path, return_exceptions=True)
    replayed = replay(fails, recording=read_recording(tmp_path))
    assert str(replayed.report.results[1]) == "as planned"
    with pytest.raises(DivergenceError, match=r"rank 1, .*\[ValueError: as planned\]"):
        replay(train, recording=read_recording(tmp_path))


def test_an_error_that_was_not_recorded_is_told_with_its_words(tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        if world.rank == 1 and recorded:
            raise KeyError("as planned\nand more")
        await ad.barrier()

    recorded: list[bool] = []
    simulate(main, ranks=2, seed=2, record=tmp_path)
    recorded.append(True)
    with pytest.raises(
        DivergenceError, match=r"rank 1, .*ended with \[\] in the recording, but with \[KeyError: .as planned"
    ):
        replay(main, recording=read_recording(tmp_path))


def test_a_metric_that_is_no_number_is_so_again(tmp_path: Path) -> None:
    simulate(train, float("nan"), ranks=3, seed=1, record=tmp_path)
    assert replay(train, float("nan"), recording=read_recording(tmp_path)).decision_count > 50


async def adds(world: ad.World) -> float:
    total = torch.zeros(1)
    for _ in range(3):
        total += await ad.all_reduce(torch.tensor([float(world.rank)]))
    await ad.barrier()
    return total.item()


def test_a_run_with_another_generator_of_numpy_is_recorded(tmp_path: Path) -> None:
    """Regression: the rank ended with KeyError when it began to record."""

    async def main(world: ad.World) -> int:
        await ad.barrier()
        return world.rank

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        ad.run_local(main, ranks=2, record=tmp_path)
    finally:
        np.random.set_bit_generator(before)
    assert replay(main, recording=read_recording(tmp_path)).report.results == (0, 1)


def test_collectives_that_used_no_recorded_message_take_place(tmp_path: Path) -> None:
    """The collectives of MPI have no recorded messages."""
    simulate(adds, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        keep_events(each, lambda event: event.kind not in ("sent", "received") or event.get("tag") != COLLECTIVE_FIRST)
    assert replay(adds, recording=read_recording(tmp_path)).report.results == (18.0,) * 4


def test_ranks_that_end_in_another_order_return_equal_results(tmp_path: Path) -> None:
    simulate(adds, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        ended = False

        def wanted(event: Event) -> bool:
            nonlocal ended
            ended = ended or event.kind == "over"
            return event.kind != "received" or not ended

        never = Event(each.header.clock_s + 100.0, "received", ((each.rank + 1) % 4, CONTROL, 53, 1, 0))
        keep_events(each, wanted, never)
    assert replay(adds, recording=read_recording(tmp_path)).report.results == (18.0,) * 4


def test_messages_from_before_the_world_opened_are_kept_apart(tmp_path: Path) -> None:
    """A real job begins with the messages of agreements, and a simulated one does not."""

    async def main(world: ad.World) -> list[float]:
        totals = []
        for number in range(4):
            if world.rank == 0:
                await world.sleep(0.1)  # then it finds the others' messages and receives them in turn
            totals.append((await ad.all_reduce(torch.tensor([float(world.rank + number)]))).item())
            await world.safe_point()
        return totals

    recorded = simulate(main, ranks=4, seed=1, record=tmp_path)
    for each in read_recording(tmp_path).ranks:
        others = [rank for rank in range(4) if rank != each.rank]
        early = [Event(each.header.clock_s, "received", (rank, COLLECTIVE_FIRST, 64, -2, 0)) for rank in others]
        keep_events(each, lambda event: True, *early)
    assert replay(main, recording=read_recording(tmp_path)).report.results == recorded.results


def test_groups_of_mpi_are_agreed_on_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members agree once more, with messages, before MPI makes a communicator."""

    async def groups(world: ad.World) -> float:
        if world.rank != 1:
            await ad.new_group([0, 2])
        return await train(world)

    native = dataclasses.replace(sim_transport._CAPABILITIES, native_collectives=True)
    monkeypatch.setattr(sim_transport, "_CAPABILITIES", native)
    recorded = simulate(groups, ranks=3, seed=1, record=tmp_path)
    monkeypatch.undo()
    assert replay(groups, recording=read_recording(tmp_path)).report.results == recorded.results


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    simulate(train, ranks=3, seed=3, record=tmp_path / "lacks")
    next((tmp_path / "lacks").glob("*-rank00001.record")).unlink()
    with pytest.raises(RecordingError, match="a replay needs the recordings of all ranks, but rank 1 has no recording"):
        replay(train, recording=read_recording(tmp_path / "lacks"))
    simulate(train, ranks=3, seed=3, record=tmp_path / "twice")
    of_rank_1 = next((tmp_path / "twice").glob("*-rank00001.record"))
    shutil.copy(of_rank_1, of_rank_1.with_name("copy.record"))
    with pytest.raises(RecordingError, match="rank 1 must have one recording"):
        replay(train, recording=read_recording(tmp_path / "twice"))
    of_rank_1.unlink()
    old = edit_headers(tmp_path / "twice", lambda header: header.pop("random"))
    with pytest.raises(RecordingError, match="random"):
        replay(train, recording=old)
    faults = (Kill(rank=2, at_s=0.005), Restart(rank=2, at_s=0.02))
    simulate(train, ranks=3, seed=3, record=tmp_path / "again", faults=faults, until_s=60.0)
    with pytest.raises(RecordingError, match="rank 2 was restarted"):
        replay(train, recording=read_recording(tmp_path / "again"))


def test_a_policy_that_reads_memory_of_others_is_refused(tmp_path: Path) -> None:
    async def main(world: ad.World) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=3) as policy:
            for _ in range(6):
                await policy.step(float(world.rank))

    simulate(main, ranks=2, seed=1, record=tmp_path)
    recording = read_recording(tmp_path)
    replay(main, recording=recording)  # by messages instead of MPI
    recording = edit_headers(tmp_path, lambda header: header["capabilities"].update(one_sided_reads=True))
    with pytest.raises(RecordingError, match=r"read each other's memory .* OneSidedSelectiveAveragingPolicy"):
        replay(main, recording=recording)


SCRIPT = """
import asyncdist as ad

async def main(world):
    await ad.barrier()
    if BROKEN and world.rank == 1:
        raise ValueError("broken")
    return world.rank

ad.run(main)
"""


def test_a_changed_script_is_named_and_may_behave_differently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "failing.py"
    script.write_text(SCRIPT.replace("BROKEN", "True"))
    namespace: dict[str, object] = {"__name__": "elsewhere"}
    source = script.read_text().replace("ad.run(main)", "")
    exec(compile(source, str(script), "exec"), namespace)
    with pytest.raises(ValueError, match="broken"):
        simulate(namespace["main"], ranks=2, seed=0, record=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broken"):
        replay_script(tmp_path / "run", script)
    assert "is not the recorded script, or has changed since the recording" in caplog.text
    script.write_text(SCRIPT.replace("BROKEN", "False"))
    assert replay_script(tmp_path / "run", script) is None, "the mended recording must replay"
    with pytest.raises(RecordingError, match=r"the recorded script 'nowhere.py' does not exist"):
        replay_script(tmp_path / "run", "nowhere.py")


def test_a_script_elsewhere_is_run_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a replay ran any script that a recording named."""
    (tmp_path / "here").mkdir()
    scripts = [tmp_path / "elsewhere.py", tmp_path / "here" / "script.py"]
    for script in scripts:
        script.write_text(SCRIPT.replace("BROKEN", "False"))
        source = script.read_text().replace("ad.run(main)", "")
        namespace: dict[str, object] = {"__name__": "elsewhere"}
        exec(compile(source, str(script), "exec"), namespace)
        simulate(namespace["main"], ranks=2, seed=0, record=tmp_path / script.stem)  # type: ignore[arg-type]
        changes: dict[str, Any] = {"script": str(script), "arguments": []}
        edit_headers(tmp_path / script.stem, operator.methodcaller("update", changes))
    monkeypatch.chdir(tmp_path / "here")
    assert replay_script(tmp_path / "script") is not None
    with pytest.raises(RecordingError, match=r"the recorded script '.*elsewhere.py' is not in the current folder"):
        replay_script(tmp_path / "elsewhere")
    (tmp_path / "here" / "link.py").symlink_to(scripts[0])
    edit_headers(tmp_path / "elsewhere", lambda header: header.update(script=str(tmp_path / "here" / "link.py")))
    with pytest.raises(RecordingError, match=r"link\.py"):
        replay_script(tmp_path / "elsewhere")
    assert replay_script(tmp_path / "elsewhere", scripts[0]) is not None


@pytest.mark.parametrize(("name", "module"), [("train", "train"), ("__main__", ""), ("__main__", "__main__")])
def test_a_module_is_replayed_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    """Regression: a job that ``-m`` had started was run as a script, so that its relative imports failed."""
    package = f"package_{name.strip('_')}{len(module)}"  # each package is imported once in this process
    script = tmp_path / package / "inner" / f"{name}.py"
    script.parent.mkdir(parents=True)
    script.with_name("parts.py").write_text("COUNT = 3\n")
    script.write_text(
        "import sys\nimport asyncdist as ad\nfrom .parts import COUNT\n"
        "async def main(world):\n    for _ in range(COUNT): await ad.barrier()\n    return sys.path[0], __name__\n"
        "if __name__ == '__main__': ad.run(main)\n"
    )

    async def main(world: ad.World) -> None:
        for _ in range(3):
            await ad.barrier()

    simulate(main, ranks=2, seed=0, record=tmp_path / "run")
    recorded = ".".join(part for part in (package, "inner", module) if part)
    changes: dict[str, Any] = {"script": str(script), "module": recorded, "arguments": []}
    edit_headers(tmp_path / "run", operator.methodcaller("update", changes))
    monkeypatch.chdir(tmp_path)
    replayed = [replay_script(tmp_path / "run"), replay_script(tmp_path / "run", script)]
    for each in replayed:
        assert each is not None and each.report.results == ((str(tmp_path), "__main__"),) * 2


def test_a_module_elsewhere_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording from someone else may name a module of Python that has effects."""
    script = tmp_path / "zipfile.py"
    script.write_text(SCRIPT.replace("BROKEN", "False"))
    simulate(adds, ranks=2, seed=0, record=tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for module in ("zipfile", "os", "os;zipfile", "."):
        changes: dict[str, Any] = {"script": str(script), "module": module, "arguments": []}
        edit_headers(tmp_path / "run", operator.methodcaller("update", changes))
        with pytest.raises(ScriptError, match="zipfile") if module == "zipfile" else contextlib.nullcontext():
            assert replay_script(tmp_path / "run") is not None


def test_another_users_script_is_run_only_if_it_is_named(tmp_path: Path) -> None:
    """Regression: a replay in /tmp ran the script there that another user's recording named."""
    script = tmp_path / "script.py"
    script.touch()
    owner, other = script.stat().st_uid, script.stat().st_uid + 1
    assert replay_scripts._why_foreign(script, tmp_path, owner) is None
    assert replay_scripts._why_foreign(script, tmp_path, other) is None, (
        "the script may be replayed if one user owns the whole folder"
    )
    os.chown(script, other, -1) if owner == 0 else pytest.skip("only root can give a file to another user")
    assert replay_scripts._why_foreign(script, tmp_path, other) is None
    assert replay_scripts._why_foreign(script, tmp_path, owner) == "belongs to another user than the current folder"


@pytest.mark.parametrize(("given", "expected"), [((), ""), (("--mine",), "--mine")])
def test_a_named_script_gets_only_the_given_arguments(
    tmp_path: Path, given: tuple[str, ...], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a recording of another user could choose the arguments of a script that its reader had named."""
    script, seen, run = tmp_path / "script.py", tmp_path / "seen", str(tmp_path / "run")
    told = f"import pathlib, sys; pathlib.Path({str(seen)!r}).write_text(' '.join(sys.argv[1:]))"
    script.write_text(told + SCRIPT.replace("BROKEN", "False"))
    simulate(train, ranks=2, seed=0, record=run)
    edit_headers(tmp_path / "run", lambda header: header.update(arguments=["--theirs", "a b"]))
    with contextlib.suppress(DivergenceError):  # the recording is of another function
        replay_script(run, script, *given)
    assert seen.read_text() == expected
    assert ("--theirs 'a b'" in caplog.text) == (not given), (
        "the recorded arguments must be logged only if none were given"
    )


def test_nothing_of_a_recording_becomes_code_of_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the name of the script was written into the test's code unchanged."""
    hostile = 'a" + str(open("PWNED", "w")) + """'
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{hostile}.py"
    script.write_text(SCRIPT)
    simulate(train, ranks=2, seed=0, record=tmp_path / "run")
    changes = {"script": str(script), "arguments": [hostile, "\n"], "hostname": hostile}
    edit_headers(tmp_path / "run", lambda header: header.update(changes))
    test = tmp_path / f"test {hostile}.py"
    assert run_command(str(tmp_path / "run"), None, (), job=None, rank=None, to_test=str(test)) == 0, (
        capsys.readouterr()
    )
    (job,) = {path.name.partition("-")[0] for path in (tmp_path / "run").glob("*.record")}
    tree = ast.parse(test.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls == {"Path", "replay_script"}
    assert [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] == [f"test_replay_of_job_{job}"]
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 4)
    assert [ast.literal_eval(argument) for argument in call.args[2:]] == [hostile, "\n"]


def test_a_link_where_the_recording_would_go_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the recording was written into the folder to which another user's link led."""
    script, elsewhere = tmp_path / "script.py", tmp_path / "elsewhere"
    script.write_text(SCRIPT)
    simulate(train, ranks=2, seed=0, record=tmp_path / "run")
    elsewhere.mkdir()
    link = tmp_path / "test_it_recording"
    link.symlink_to(elsewhere)
    test = tmp_path / "test_it.py"
    assert run_command(str(tmp_path / "run"), str(script), (), job=None, rank=None, to_test=str(test)) == 2
    assert not list(elsewhere.iterdir()) and not test.exists()
    assert f"{str(link)!r} already exists" in capsys.readouterr().err


def test_a_full_disk_leaves_no_part_of_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the folder stayed, so a second attempt was refused, and the error named the recording."""

    def copy(source: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(folder / source.name))

    script, test = tmp_path / "script.py", tmp_path / "test_it.py"
    script.write_text(SCRIPT)
    simulate(train, ranks=2, seed=0, record=tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copy", copy)
        assert run_command(str(tmp_path / "run"), str(script), (), job=None, rank=None, to_test=str(test)) == 2
    assert str(tmp_path / "test_it_recording") in capsys.readouterr().err
    assert run_command(str(tmp_path / "run"), str(script), (), job=None, rank=None, to_test=str(test)) == 0
    assert test.exists()


LOCAL = """
import asyncdist as ad

async def main(world):
    await ad.barrier()
    return world.rank

VALUES = ad.run_local(main, ranks=3, record=FOLDER)
assert VALUES == [0, 1, 2]
"""


def test_a_script_that_hosts_its_ranks_by_run_local_is_replayed(tmp_path: Path) -> None:
    """Regression: the script ran again without a simulation, and wrote another recording."""
    script, folder = tmp_path / "local.py", tmp_path / "run"
    script.write_text(LOCAL.replace("FOLDER", repr(str(folder))))
    runpy.run_path(str(script), run_name="__main__")
    recorded = sorted(folder.iterdir())
    replayed = replay_script(folder, script)
    assert replayed is not None and list(replayed.report.results) == [0, 1, 2]
    assert sorted(folder.iterdir()) == recorded and len(recorded) == 3


def test_a_replayed_script_does_not_replace_its_recording(tmp_path: Path) -> None:
    """Regression: a script that records a simulation recorded again in its replay, and removed the recording."""
    script, folder = tmp_path / "simulated.py", tmp_path / "run"
    script.write_text(
        LOCAL.replace("run_local", "simulate").replace("FOLDER", repr(str(folder))).partition("assert")[0]
    )
    runpy.run_path(str(script), run_name="__main__")
    recorded = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="record must be None") as refused:
        replay_script(folder, script)
    assert repr(str(folder)) in str(refused.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == recorded and len(recorded) == 3


def test_a_message_before_a_safe_point_wakes_its_task_within_it(tmp_path: Path) -> None:
    """In the replay the message is there earlier, while user code still waits for something else."""
    places: list[str] = []

    async def main(world: ad.World) -> None:
        channel, place = world.channel(Word, tag=40), "before"

        async def listen() -> None:
            await channel.receive()
            places.append(place)

        if world.rank == 0:
            await channel.send(Word(1), 1)
            return
        listener = asyncio.create_task(listen())
        await world.sleep(0.1)
        loop: Any = asyncio.get_running_loop()
        await loop.be_busy(0.2)  # the message arrives
        world.services.engine.poll()
        place = "within"
        await world.safe_point()
        await listener

    simulate(main, ranks=2, seed=1, record=tmp_path, network=Network(link=Link(latency_s=Uniform(0.2, 0.2))))
    assert places == ["within"]
    replay(main, recording=read_recording(tmp_path))
    assert places == ["within"] * 2
