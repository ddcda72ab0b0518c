"""Replays a script: ``asyncdist replay``, and tests that it has written."""

from __future__ import annotations

import contextvars
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncdist.recording.command_output import refuse
from asyncdist.recording.file_errors import why_not_written
from asyncdist.recording.reader import Recording, RecordingError, read_recording
from asyncdist.runtime.world import World
from asyncdist.simulation.determinism.entropy import known_torch_seed
from asyncdist.simulation.exploration.fault_plans import ScriptError
from asyncdist.simulation.faults import Fault
from asyncdist.simulation.processes.debugger import RankDebugger
from asyncdist.simulation.replay.comparison import DivergenceError
from asyncdist.simulation.replay.job import draw_as, torch_state_of
from asyncdist.simulation.replay.replay import Replayed, check_replayable, replay
from asyncdist.simulation.report import SimReport
from asyncdist.simulation.run_script import Script, execute, print_failures, print_out, results_of
from asyncdist.validation import printable
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("asyncdist.simulation.replay")

#: What is put into it is a literal of Python, or a name that :func:`_write_test` has made.
_TEST = '''"""Replays a recorded job; written by asyncdist replay --to-test."""

from pathlib import Path

from asyncdist.simulation import replay_script

HERE = Path(__file__).parent


def test_replay_of_job_{name}() -> None:
    replay_script(HERE / {recordings!r}, HERE / {script!r}{arguments})
'''


@dataclass(frozen=True, slots=True)
class _ReplayedScript(Script):
    """A script whose ranks do as they did in a recorded run.

    Attributes:
        recording: of that run.
        debugger: of one rank, if there is one.
        ended: gets the result.
    """

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
        """Replay in place of simulating; what a rank draws goes on where it did in the recorded run."""
        del seed, faults, strict, inherited
        assert self.recording is not None and self.ended is not None

        def on_open(world: World) -> None:
            if self.debugger is not None:
                self.debugger.watch(main, world.rank)

        known_torch_seed.set(None)  # from here on each rank sets its own
        replayed = replay(main, *args, recording=self.recording, on_open=on_open)
        self.ended.append(replayed)
        return replayed.report

    @property
    def is_local(self) -> bool:
        """Whether the recorded ranks were of one process, so that ``asyncdist.run_local`` may have hosted them."""
        assert self.recording is not None
        return self.recording.ranks[0].conditions().capabilities.shares_process

    def begin_process(self, rank: int) -> None:
        """Let torch draw what it drew before the world was open: with the seeds of its process and of ``torch.seed()``.

        The second is that of the state in which the rank opened its world, where it is the last seed before that.
        """
        assert self.recording is not None
        conditions = self.recording.ranks[rank].conditions()
        opened = torch.Generator()
        opened.set_state(torch_state_of(conditions))
        torch.manual_seed(opened.initial_seed() if conditions.first_seed is None else conditions.first_seed)
        known_torch_seed.set(opened.initial_seed())

    def on_world_opened(self, rank: int) -> None:
        """Go on with the random states that this rank has had where it opened its world."""
        assert self.recording is not None
        known_torch_seed.set(None)
        draw_as(self.recording.ranks[rank].conditions())


def _script_of(
    recording: Recording, path: str | os.PathLike[str] | None, arguments: Sequence[str], debugger: RankDebugger | None
) -> _ReplayedScript:
    """Return the script of a recording: the one that is named, else the one that was recorded; its arguments alike.

    Raises:
        RecordingError: the script is not there; or a recording alone names it, and it is not in the current folder.
    """
    header = recording.ranks[0].header
    name = os.fspath(path or header.script)
    if not name:
        raise RecordingError("the recorded run had no script, as in a notebook: name one that runs the same")
    if path is None and not Path(name).resolve().is_relative_to(Path.cwd().resolve()):
        raise RecordingError(
            f"the recording names the script {name!r}, which is not in the current folder, and a recording may name any"
            " file; name the one to be run: asyncdist replay DIR FILE"
        )
    if not os.path.isfile(name):
        raise RecordingError(
            f"{name!r}, the script of the recorded run, is not there; name it: asyncdist replay DIR FILE"
        )
    if header.script_digest != hashlib.sha256(Path(name).read_bytes()).hexdigest():
        logger.warning("%s is another script than the recorded one, or has changed since", name)
    words = tuple(arguments) or tuple(header.arguments)
    return _ReplayedScript(name, words, recording.size, recording=recording, debugger=debugger, ended=[])


def replay_script(
    folder: str | os.PathLike[str],
    script: str | os.PathLike[str] | None = None,
    *arguments: str,
    job: str | None = None,
) -> Replayed | None:
    """Run a script once more as it ran when it was recorded, in the simulator; for tests.

    A recorded run that ended well must go the same way. One that failed may go another way, since its fault may have
    been mended; but it must not fail.

    Args:
        folder: of the recording, as given to ``record=``.
        script: the path of the script; by default the recorded one's, if that is in the current folder or below it.
        arguments: of the script; by default the recorded ones.
        job: which one, where the folder has recordings of several.

    Returns:
        What the replay came to; None where it went another way.

    Raises:
        DivergenceError: a run that ended well goes another way now.
        RecordingError: the recording cannot be read or replayed.
        ScriptError: the script does not call ``asyncdist.run`` exactly once.
        BaseException: what a rank has raised.
    """
    recording = read_recording(folder, job)
    check_replayable(recording)
    ran = _script_of(recording, script, arguments, None)
    error = contextvars.copy_context().run(execute, ran, 0, ()).error
    if isinstance(error, DivergenceError) and _has_failed(recording):
        logger.warning("the run goes another way than the recorded one, which failed: %s", error)
        return None
    if error is not None:
        raise error
    assert ran.ended, "a script without an error has been replayed"
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
    """``asyncdist replay``: replay a recording, and print what came of it.

    Args:
        folder, script, arguments, job: as for :func:`replay_script`.
        rank: the one in which pdb stops; None for none.
        to_test: where to write a test that does the same; None for nowhere.

    Returns:
        The exit code: 0; 1 where the replay differs, or a rank fails as it did; 2 for wrong input.
    """
    try:
        recording = read_recording(folder, job)
        check_replayable(recording)
        if rank is not None and not 0 <= rank < recording.size:
            raise ScriptError(f"--rank is {rank}; allowed: 0 to {recording.size - 1}, as many as were recorded")
        ran = _script_of(recording, script, arguments, None if rank is None else RankDebugger(rank))
        if to_test is not None:
            print_out(*_write_test(recording, ran, Path(to_test)))
            return 0
        return _replay_once(recording, ran)
    except (RecordingError, ScriptError) as error:
        return refuse("replay", error)
    except KeyboardInterrupt:
        print("asyncdist replay: interrupted", file=sys.stderr)
        return 130


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
    if ran.debugger is not None and ran.debugger.quitting:  # what the ranks do from then on is no difference
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
    without = "no result" if replayed.cut_ranks else "None"  # of a rank that has not come to its end
    print_out(*results_of(replayed.report, without), *_summary(replayed))
    return 1 if failed else 0


def _summary(replayed: Replayed) -> list[str]:
    lines = [f"{replayed.decision_count} decisions, metrics and checksums of weights are those that were recorded"]
    if replayed.cut_ranks:
        ranks = ranks_in_words(replayed.cut_ranks)
        lines.append(f"the record ends before main did on {ranks} (killed, stopped by a signal, or its file is full)")
    if replayed.left_count:
        why = "need something of these" if replayed.cut_ranks else "came as the job had failed"
        lines.append(f"{replayed.left_count} more {why}, and were not come to")
    return lines


def _write_test(recording: Recording, ran: Script, path: Path) -> list[str]:
    """Write a test, with a copy of the recording beside it."""
    if path.suffix != ".py":
        raise ScriptError(f"--to-test is {str(path)!r}; the test's file ends with .py")
    if path.exists():
        raise ScriptError(f"{str(path)!r} is there already")
    folder = path.with_name(f"{path.stem}_recording")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()  # a link there, which may be another user's, is not followed
        for each in recording.ranks:
            shutil.copy(each.path, folder)
        text = _TEST.format(
            name=re.sub(r"\W", "_", recording.job, flags=re.ASCII),
            recordings=folder.name,
            script=os.path.relpath(ran.path, path.parent).replace("\\", "/"),
            arguments="".join(f", {word!r}" for word in ran.arguments),
        )
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ScriptError(f"{error.filename!r} is there already") from error
    except OSError as error:
        raise ScriptError(f"the test cannot be written: {why_not_written(error)}") from error
    return [f"wrote {path}, and the recording beside it, {folder}", f"run it: pytest {path}"]
