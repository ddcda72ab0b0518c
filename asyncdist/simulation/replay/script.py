"""Implements ``asyncdist replay``, which replays a recorded script, and the function that its tests call."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
import os
import shlex
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncdist.errors import is_consequence
from asyncdist.recording.command_output import refuse
from asyncdist.recording.file_errors import why_not_written
from asyncdist.recording.reader import Recording, RecordingError, read_recording
from asyncdist.runtime.world import World
from asyncdist.simulation.determinism.rng import known_torch_seed
from asyncdist.simulation.exploration.repro_command import ScriptError
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.processes.debugger import RankDebugger
from asyncdist.simulation.replay.comparison import DivergenceError
from asyncdist.simulation.replay.replay import Replayed, check_replayable, draw_as, replay, torch_state_of
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.run_script import Script, execute, print_failures, print_out, results_of
from asyncdist.simulation.simulate import keeps_recordings
from asyncdist.validation import printable
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.simulation.replay")

#: Template of a test. :func:`_write_test` inserts only Python literals and a valid name.
_TEST = '''"""Replays a recorded job; written by asyncdist replay --to-test."""

from pathlib import Path

from asyncdist.simulation import replay_script

HERE = Path(__file__).parent


def test_replay_of_job_{name}() -> None:
    replay_script(HERE / {recordings!r}, HERE / {script!r}{arguments})
'''


@dataclass(frozen=True, slots=True)
class _ReplayedScript(Script):
    """A script that replays a recorded run instead of simulating a new one, and appends the result to ``ended``."""

    recording: Recording | None = None
    debugger: RankDebugger | None = None
    ended: list[Replayed] | None = None

    def simulate(
        self,
        main: Callable[..., Any],
        args: tuple[Any, ...],
        seed: int,
        faults: tuple[Fault, ...],
        strict: bool,
        inherited: list[str],
    ) -> SimReport[Any]:
        """Replay the recording instead of simulating. Each rank begins with its recorded random states."""
        del seed, faults, strict, inherited
        assert self.recording is not None and self.ended is not None

        def on_open(world: World) -> None:
            if self.debugger is not None:
                self.debugger.watch(main, world.rank)

        known_torch_seed.set(None)  # each rank sets its own seed from now on
        replayed = replay(main, *args, recording=self.recording, on_open=on_open)
        self.ended.append(replayed)
        return replayed.report

    @property
    def is_local(self) -> bool:
        """Whether the recorded ranks shared one process, which ``asyncdist.run_local`` may have hosted."""
        assert self.recording is not None
        return self.recording.ranks[0].conditions().capabilities.shares_process

    def begin_process(self, rank: int) -> None:
        """Seed torch so that it generates the recorded numbers until the world opens.

        ``torch.seed()`` returns the recorded seed, unless another seed was set before the rank opened its world.
        """
        assert self.recording is not None
        conditions = self.recording.ranks[rank].conditions()
        opened = torch.Generator()
        opened.set_state(torch_state_of(conditions))
        torch.manual_seed(opened.initial_seed() if conditions.first_seed is None else conditions.first_seed)
        known_torch_seed.set(opened.initial_seed())
        keeps_recordings.set(True)

    def on_world_opened(self, rank: int, frame: types.FrameType | None) -> None:
        assert self.recording is not None
        if self.debugger is not None:
            self.debugger.watch_script(frame, rank)
        known_torch_seed.set(None)
        draw_as(self.recording.ranks[rank].conditions())


def _why_foreign(script: Path, folder: Path, user: int) -> str | None:
    """Return why a script that is named only by a recording may belong to another user, or None if it may be run.

    Args:
        folder: Current folder, possibly shared by all users, such as ``/tmp``.
    """
    if not script.is_relative_to(folder):
        return "is not in the current folder"
    owner = script.stat().st_uid if script.exists() else user
    return None if owner in (user, 0, folder.stat().st_uid) else "belongs to another user than the current folder"


def _script_of(
    recording: Recording, path: str | os.PathLike[str] | None, arguments: Sequence[str], debugger: RankDebugger | None
) -> _ReplayedScript:
    """Return the script to replay. Raise RecordingError if it does not exist or is not in the current folder."""
    header = recording.ranks[0].header
    name = os.fspath(path or header.script)
    if not name:
        raise RecordingError(
            "the recorded run had no script (a notebook, for example); name a script that runs the same main: "
            "asyncdist replay DIR FILE"
        )
    foreign = None if path is not None else _why_foreign(Path(name).resolve(), Path.cwd().resolve(), os.getuid())
    if foreign is not None:
        raise RecordingError(
            f"the recorded script {name!r} {foreign}. A recording may name any file, so name the script to run: "
            "asyncdist replay DIR FILE"
        )
    if not os.path.isfile(name):
        raise RecordingError(
            f"the recorded script {name!r} does not exist; name the script to run: asyncdist replay DIR FILE"
        )
    if header.script_digest != hashlib.sha256(Path(name).read_bytes()).hexdigest():
        logger.warning("%s is not the recorded script, or has changed since the recording", name)
    words, recorded = tuple(arguments), tuple(header.arguments)
    if path is None:
        words = words or recorded
    elif recorded and not words:  # another user may have chosen the recorded arguments
        logger.warning(
            "%s runs without arguments, because only the script was named. The recorded arguments are: %s",
            name,
            shlex.join(map(printable, recorded)),
        )
    module = _module_of(header.module, Path(name))
    return _ReplayedScript(name, words, recording.size, recording=recording, debugger=debugger, ended=[], module=module)


def _module_of(recorded: str, script: Path) -> str:
    """Return the full name of the module that was recorded with ``python -m``, if it may be this script, or ""."""
    parts = recorded.split(".")
    if recorded in ("", "__main__") or not all(map(str.isidentifier, parts)):
        return ""
    place = script.resolve().with_suffix("").parts
    found = next((each for each in (parts, [*parts, "__main__"]) if list(place[-len(each) :]) == each), [])
    return ".".join(found)


def replay_script(
    folder: str | os.PathLike[str],
    script: str | os.PathLike[str] | None = None,
    *arguments: str,
    job: str | None = None,
) -> Replayed | None:
    """Replay the recorded run of a script in the simulator, for use in tests.

    If the recorded run succeeded, the replay must not differ from it. If it failed, the replay may differ, because the
    defect may have been fixed since, but no rank may fail. The replay ends at the first difference. Code that would run
    later is not tested.

    Args:
        folder: Folder of the recording, as passed to ``record=``.
        script: Path of the script; by default the recorded path, which must be in or below the current folder.
        arguments: Arguments of the script. Without ``script``, the recorded arguments are the default.
        job: Name of the job, if the folder has recordings of several jobs.

    Returns:
        Result of the replay; None if the replay differs from a run that failed.

    Raises:
        DivergenceError: The replay differs from a run that succeeded.
        RecordingError: The recording cannot be read or replayed.
        ScriptError: The script does not call ``asyncdist.run`` exactly once.
        BaseException: The error that a rank raised.
    """
    recording = read_recording(folder, job)
    check_replayable(recording)
    ran = _script_of(recording, script, arguments, None)
    error = contextvars.copy_context().run(execute, ran, 0, ()).error
    if isinstance(error, DivergenceError) and _has_failed(recording):
        if (cause := error.__cause__) is not None and not is_consequence(cause):
            raise cause
        logger.warning("the recorded run failed, and the replay differs from it: %s", error)
        return None
    if error is not None:
        raise error
    assert ran.ended, "a script that raised no error has a result"
    return ran.ended[0]


def _has_failed(recording: Recording) -> bool:
    ends = [[event.get("error") for event in each.events() if event.kind == "over"] for each in recording.ranks]
    return any(not end or end[-1] for end in ends)


def run_command(
    folder: str,
    script: str | None,
    arguments: Sequence[str],
    *,
    job: str | None,
    rank: int | None,
    to_test: str | None,
) -> int:
    """Replay a recording, print the result, and return the exit code.

    The code is 0 if the replay equals the recording, 1 if it differs or a rank fails as recorded, and 2 for invalid
    input. pdb stops in ``rank``. If ``to_test`` is a path, write a test there instead.
    """
    try:
        recording = read_recording(folder, job)
        check_replayable(recording)
        if rank is not None and not 0 <= rank < recording.size:
            raise ScriptError(f"--rank must be from 0 to {recording.size - 1} (the recorded ranks), got {rank}")
        ran = _script_of(recording, script, arguments, None if rank is None else RankDebugger(rank))
        if to_test is not None:
            print_out(*_write_test(recording, ran, Path(to_test)))
            return 0
        return _replay_once(recording, ran)
    except (RecordingError, ScriptError) as error:
        return refuse("replay", error)


def _replay_once(recording: Recording, ran: _ReplayedScript) -> int:
    header = recording.ranks[0].header
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(recording.began_at))
    what = f"job {recording.job}: {recording.size} ranks, {header.transport}, on {header.hostname}, {began}"
    print_out(printable(what))
    try:
        ended = contextvars.copy_context().run(execute, ran, 0, ())
    finally:
        if ran.debugger is not None:
            ran.debugger.close()
    if ran.debugger is not None and ran.debugger.quitting:  # quitting the debugger causes differences
        return 1
    if isinstance(ended.error, DivergenceError):
        print(f"asyncdist replay: the replay differs: {printable(ended.error.message)}", file=sys.stderr)
        return 1
    if isinstance(ended.error, (ScriptError, RecordingError)):
        raise ended.error
    if not ran.ended:
        print_failures(None, ended.error, "replay")
        return 1
    replayed = ran.ended[0]
    failed = print_failures(replayed.report, ended.error, "replay")
    without = "no result" if replayed.cut_ranks else "None"  # shown for a rank that has not ended
    print_out(*results_of(replayed.report, without), *_summary(replayed))
    return 1 if failed else 0


def _summary(replayed: Replayed) -> list[str]:
    lines = [f"{replayed.decision_count} decisions, metrics and checksums of weights are the same as in the recording"]
    if replayed.cut_ranks:
        ranks = ranks_in_words(replayed.cut_ranks)
        lines.append(f"the record of {ranks} ends before main (killed, stopped by a signal, or the file was full)")
    if replayed.left_count:
        why = "depend on those ranks" if replayed.cut_ranks else "followed the failure of the job"
        lines.append(f"{replayed.left_count} more {why}, and were not replayed")
    return lines


def _write_test(recording: Recording, ran: Script, path: Path) -> list[str]:
    """Write a test and, into a folder next to it, a copy of the recording. Return the lines to print."""
    if path.suffix != ".py":
        raise ScriptError(f"--to-test must be a path that ends with .py, got {str(path)!r}")
    if path.exists():
        raise ScriptError(f"the path {str(path)!r} already exists; choose another path")
    folder = path.with_name(f"{path.stem}_recording")
    try:
        with contextlib.ExitStack() as undone:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()  # fails if the path is a link, which another user may have created
            undone.callback(shutil.rmtree, folder, ignore_errors=True)
            for each in recording.ranks:
                shutil.copy(each.path, folder)
            text = _TEST.format(
                name=recording.job,
                recordings=folder.name,
                script=os.path.relpath(ran.path, path.parent).replace("\\", "/"),
                arguments="".join(f", {word!r}" for word in ran.arguments),
            )
            with path.open("x", encoding="utf-8") as file:
                undone.callback(path.unlink)
                file.write(text)
            undone.pop_all()
    except FileExistsError as error:
        raise ScriptError(f"the path {error.filename!r} already exists; choose another path") from error
    except OSError as error:
        raise ScriptError(f"the test cannot be written: {why_not_written(error)}") from error
    return [f"wrote {path}, and the recording into {folder}", f"run it: pytest {path}"]
