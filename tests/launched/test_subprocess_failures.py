"""Tests how jobs of ``launch_subprocesses`` fail: which rank is named, and which processes end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from support import mpi
from support.processes import is_alive, wait_until
from support.subprocesses import METHODS, TIMEOUT_S, config, launch_here, note_rank, reports

import asyncdist as ad
from asyncdist import rank_program
from asyncdist.errors import RankLostError, TransportError
from asyncdist.launch import guardians, local_ranks, process_groups, rank_process, spawn
from asyncdist.launch.config import MultiprocessConfig
from asyncdist.launchers import addresses, launcher_signals
from asyncdist.transports.torch_distributed.meeting import stores

# ------------------------------------------------------------------------------------------------------------ failures


def note_pid(folder: str) -> None:
    Path(folder, f"{os.getpid()}.pid").touch()


def fail_on_rank_1(folder: str, how: str) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise RuntimeError("story of rank 1")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(7)
    if how == "raise":
        dist.barrier()  # this fails because rank 1 has ended: a consequence, not the cause that the caller needs
    time.sleep(600)


def test_of_two_failures_the_earlier_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the lower rank was named if the launcher read both messages at once."""
    monkeypatch.setattr(spawn._Child, "end_rest", lambda self: None)
    children = []
    for rank in (1, 0):  # in the order of their failures
        ours, theirs = multiprocessing.Pipe(duplex=False)
        rank_process._FailureNotice(theirs).send(RuntimeError(f"story of rank {rank}"))
        children.append(spawn._Child(rank, cast(Any, SimpleNamespace(exitcode=1)), ours))
    assert "story of rank 1" in spawn._find_cause(children[::-1])


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.02)


def pids_in(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ranks have started"
        time.sleep(0.02)
    return [int(path.stem) for path in found]


@pytest.mark.parametrize(
    ("method", "how", "words"),
    [
        ("forkserver", "raise", ["rank 1 ", "story of rank 1", "in fail_on_rank_1"]),
        pytest.param("spawn", "raise", ["rank 1 ", "story of rank 1", "in fail_on_rank_1"], marks=pytest.mark.long),
        ("forkserver", "kill", ["rank 1 ", "SIGKILL"]),
        pytest.param("spawn", "kill", ["rank 1 ", "SIGKILL"], marks=pytest.mark.long),
        ("forkserver", "exit", ["rank 1 ", "code 7"]),
    ],
)
def test_a_failing_rank_is_the_error_and_the_others_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str, words: list[str]
) -> None:
    monkeypatch.setitem(spawn._PATIENCE_S, spawn.PERHAPS, TIMEOUT_S)  # rank 0 may report first that it has lost rank 1
    ranks = 2 if method == "spawn" else 3  # each rank that is spawned imports torch
    with pytest.raises(RuntimeError) as caught:
        launch_here(fail_on_rank_1, config(ranks, launch_method=method), str(tmp_path), how)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert [pid for pid in pids_in(tmp_path, ranks) if is_alive(pid)] == []


class Stop(BaseException):
    """Derives from BaseException alone, as asyncio.CancelledError does."""


def stop(code: int | None) -> None:
    if code is not None:
        sys.exit(code)
    raise Stop("story")


@pytest.mark.parametrize(("code", "words"), [(None, "Stop: story"), (256, "rank 0 exited with 256")])
def test_ends_without_an_exception_are_reported(code: int | None, words: str) -> None:
    """Regression: the error was "exited with code 1" instead of the traceback; and the system reads 256 as 0."""
    with pytest.raises(RuntimeError, match=words):
        launch_here(stop, config(1), code)


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (3, 3), (256, 1), (-1, 255), (2**40, 1), ("no", 1)])
def test_no_exit_code_of_a_failure_is_0(code: object, expected: int) -> None:
    assert rank_program.exit_code(code) == expected


def start_children(folder: str, how: str) -> None:
    """Start two children that survive: one in the rank's process group with all its files, one in its own session."""
    if os.fork() == 0:
        note_pid(folder)
        time.sleep(600)
    Path(folder, f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid}.pid").touch()
    pids_in(Path(folder), 2)
    if how == "raise":
        raise ValueError("story")


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere only its process group ends with a rank")
@pytest.mark.parametrize(
    ("method", "how"), [("forkserver", "return"), pytest.param("spawn", "raise", marks=pytest.mark.long)]
)
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path, method: str, how: str) -> None:
    launching = pytest.raises(RuntimeError, match="story") if how == "raise" else contextlib.nullcontext()
    with launching:
        launch_here(start_children, config(1, launch_method=method), str(tmp_path), how)
    assert [pid for pid in pids_in(tmp_path, 2) if is_alive(pid)] == []


def die_beside_a_child(folder: str) -> None:
    if os.fork() == 0:
        note_pid(folder)
        time.sleep(600)
    pids_in(Path(folder), 1)
    os.kill(os.getpid(), 9)


def test_a_killed_rank_is_told_though_its_child_lives(tmp_path: Path) -> None:
    """Regression: with "spawn" the child kept open the descriptor that reports the rank's end."""
    with pytest.raises(RuntimeError, match="rank 0 was killed by SIGKILL"):
        launch_here(die_beside_a_child, config(1, launch_method="spawn"), str(tmp_path))
    wait_gone(pids_in(tmp_path, 1))


def vanish(folder: str) -> None:
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


async def vanish_from_a_world(world: ad.World, folder: str) -> None:
    note_pid(folder)
    await ad.barrier()
    if world.rank == 1:
        os._exit(0)
    await ad.barrier()


@pytest.mark.long
def test_a_rank_that_failed_is_told_where_sigchld_is_ignored() -> None:
    """Regression: with "spawn" the launcher waited forever, because the kernel then keeps no exit codes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(RuntimeError, match="rank 0 exited with code 3"):
            launch_here(os._exit, config(1, launch_method="spawn"), 3)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        with pytest.raises(RuntimeError, match="SIGCHLD must not be ignored in this process"):
            asyncio.run(asyncio.to_thread(launch_here, os._exit, config(1), 3))
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("func", [vanish, vanish_from_a_world])
def test_a_rank_that_left_with_0_is_named_by_ranks_that_miss_it(tmp_path: Path, func: Callable[..., Any]) -> None:
    """Regression: the error was the other ranks' "connection reset by peer", although the launcher knows the cause.

    An error from torch is shown as well, because it may have another cause; the world's notice of the loss is not.
    """
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with exit code 0 before its function had ret") as caught:
        launch_here(func, config(3), str(tmp_path))
    told = str(caught.value).partition(" returned")[2]
    if func is vanish:
        assert re.match(r"; rank [02] failed:\n.*Error: .*gloo", told, re.DOTALL), told
    else:
        assert told == ""
    assert [pid for pid in pids_in(tmp_path, 3) if is_alive(pid)] == []


def leave_early(folder: str) -> None:
    note_pid(folder)
    if dist.get_rank() == 1:
        sys.exit(0)


def test_a_rank_that_calls_exit_with_0_has_returned(tmp_path: Path) -> None:
    launch_here(leave_early, config(2), str(tmp_path))
    assert len(pids_in(tmp_path, 2)) == 2


def lose(folder: str) -> None:
    """Rank 0 first reports that it has lost rank 1, which reports the reason later."""
    note_pid(folder)
    if dist.get_rank() == 0:
        raise RankLostError("rank 1 is lost", rank=1)
    pids_in(Path(folder), 2)
    time.sleep(0.5)
    raise ValueError("the cause")


def test_the_failed_rank_is_named_and_not_one_that_lost_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 .*ValueError: the cause"):
        launch_here(lose, config(), str(tmp_path))


def die(folder: str, how: str) -> None:
    """Rank 1 dies; gloo notifies rank 0, which reports this first."""
    note_pid(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        pids_in(Path(folder), 3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("no data here")
    Path(folder, f"{-1 - dist.get_rank()}.pid").touch()
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(("how", "words"), [("kill", "was killed by SIGKILL"), ("exit", "exited with 'no data here'")])
def test_the_dead_rank_is_named_and_not_one_that_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    monkeypatch.setitem(spawn._PATIENCE_S, spawn.PERHAPS, TIMEOUT_S)
    with pytest.raises(RuntimeError, match=f"^rank 1 {words}$"):
        launch_here(die, config(), str(tmp_path), how)


def nothing() -> None:
    raise AssertionError("it was called")


def test_a_host_of_rank_0_that_does_not_answer_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the check, torch would wait for half an hour."""
    for name in local_ranks.rank_variables(0, 1, local_rank=0, local_size=1, address="", port=1, run_id=""):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_process, "START_TIMEOUT_S", 1.0)
    port = addresses.find_free_port()
    cfg = MultiprocessConfig(rank=1, world_size=2, local_world_size=1, master_port=port)
    with pytest.raises(
        TransportError, match=f"rank 1 did not reach the other 1 ranks at 127.0.0.1:{port} within 1 s: "
    ):
        ad.init_and_run(nothing, cfg)
    assert not dist.is_initialized()
    assert capfd.readouterr().err == "", "torch must not print the stack of each attempt"
    with pytest.raises(ValueError, match="timeout_s must be > 0 seconds, got 0"):
        ad.init_dist(0, 0, 1, 1, "127.0.0.1", port, timeout_s=0)


def test_a_listener_that_does_not_answer_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the rank waited forever, and ignored Ctrl-C, if a web server listened at the port."""
    monkeypatch.setattr(stores, "_MARGIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with pytest.raises(TransportError, match=f"127.0.0.1:{port} within 0.1 s: .* does not answer"):
            process_groups._join_store(f"tcp://{host}:{port}", (host, port), 1, 2, 0.1)


def test_the_store_of_a_process_group_listens_at_its_address() -> None:
    """Regression: the store, which knows no secret, listened at all addresses of the host."""
    port = addresses.find_free_port()
    store = process_groups._join_store("env://", ("127.0.0.1", port), 0, 1, 5.0)
    with socket.create_server(("127.0.0.2", port)):  # fails if the store listens there, too
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_taken_master_port_is_named_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_start_all", lambda *_: pytest.fail("a rank was started"))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            ValueError,
            match=f"master_port must be a port of this host on which rank 0 can listen, got {port} ",
        ):
            launch_here(note_rank, config(master_port=port), "folder")
    addresses.probe_port(port)


def await_signal(folder: str) -> None:
    caught: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    note_pid(folder)
    while not caught:
        time.sleep(0.01)


def test_a_signal_that_is_not_handled_reaches_the_ranks(tmp_path: Path) -> None:
    """Regression: SIGUSR2 killed the program, and with it the ranks."""

    def send() -> None:
        pids_in(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGUSR2)

    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    sender = threading.Thread(target=send)
    sender.start()
    launch_here(await_signal, config(), str(tmp_path))
    sender.join()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_ctrl_c_while_a_rank_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if Ctrl-C was pressed while the fork server imported torch, the rank started later, and ran."""
    started: list[int] = []
    read_signed = forkserver.read_signed  # type: ignore[attr-defined]

    def interrupt(descriptor: int) -> int:
        started.append(read_signed(descriptor))
        raise KeyboardInterrupt

    monkeypatch.setattr(forkserver, "read_signed", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        launch_here(time.sleep, config(), 600.0)
    assert len(started) == 1 and wait_until(lambda: not is_alive(started[0]), 20)
    assert caught.tb, "the error is kept, and with it the variables of its frames"


def ignore_signals(folder: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    note_pid(folder)
    if dist.get_rank() == 0:
        pids_in(Path(folder), 2)
        raise ValueError("story")
    time.sleep(600)


def test_a_rank_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_signals, "STOP_S", 0.2)
    with pytest.raises(RuntimeError, match="story"):
        launch_here(ignore_signals, config(), str(tmp_path))
    assert [pid for pid in pids_in(tmp_path, 2) if is_alive(pid)] == []


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_travel_is_refused_before_a_rank_starts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_wait_for_all", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(TypeError, match=r"<lambda>.*cannot be sent to another process.*must be importable by name"):
        launch_here(lambda: None, config(launch_method=method))
    with pytest.raises(TypeError, match=r"note_rank.*cannot be sent to another process.*arguments must be picklable"):
        launch_here(note_rank, config(launch_method=method), threading.Lock())


@pytest.mark.parametrize(
    ("func", "cfg", "offset", "words"),
    [
        ("name", config(), 0, "func must be a function or a coroutine function, got 'name'"),
        (note_rank, config(rank=1), 0, "rank must be None, because each child process gets a separate one, got 1"),
        (note_rank, config(), 1, "rank_offset must be from 0 to 0 with world_size=2 and local_world_size=2, got 1"),
        (note_rank, config(), -1, "-1"),
        (note_rank, config(), 0.0, "0.0"),
        (note_rank, 4, 0, "cfg must be a MultiprocessConfig, got 4"),
        (note_rank, {"world_size": 2}, 0, "{'world_size': 2}"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(func: Any, cfg: MultiprocessConfig, offset: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        ad.launch_subprocesses(func, cfg, None, offset)
    assert words in str(caught.value)


def test_arguments_in_the_place_of_setup_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"setup must be None or a function without arguments, got 100\. The arguments of func follow"
    ):
        ad.launch_subprocesses(note_rank, config(), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("func", "cfg", "words"),
    [(note_rank, None, "cfg .*None"), ("x", config(), "func .*'x'")],
)
def test_a_rank_that_cannot_be_is_refused(func: Any, cfg: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ad.init_and_run(func, cfg)


# -------------------------------------------------------------------------------------------- from a script of its own


SCRIPT = """
import pathlib, os, subprocess, sys, time
import asyncdist as ad
from asyncdist.launch import spawn

{top}

def work(folder):
    inside = subprocess.Popen(["sleep", "600"]).pid
    outside = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    for name in (f"{{inside}}.pid", f"{{outside}}.session", f"{{os.getpid()}}.pid"):
        pathlib.Path(folder, name).touch()
    time.sleep(600)

{guard}
    spawn.START_TIMEOUT_S = {timeout_s}
    ad.launch_subprocesses(work, ad.MultiprocessConfig(world_size=2, launch_method={method!r}), None, 0, sys.argv[1])
"""
GUARD = 'if __name__ == "__main__":'


def start_script(
    tmp_path: Path, *, top: str = "", guard: str = GUARD, timeout_s: float = 300.0, method: str = "forkserver"
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(top=top, guard=guard, timeout_s=timeout_s, method=method))
    root = str(Path(ad.__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )


SAVES = """
import os, pathlib, signal, sys, time
import asyncdist as ad

async def work(world, folder):
    await ad.barrier()
    pathlib.Path(folder, f"{os.getpid()}.pid").touch()
    try:
        await world.sleep(300)
    finally:
        time.sleep(0.5)
        pathlib.Path(folder, f"{world.rank}.saved").touch()

if __name__ == "__main__":
    ad.launch_subprocesses(work, ad.MultiprocessConfig(world_size=2), None, 0, sys.argv[1])
"""


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere the descendants are not listed")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_one_signal_to_all_processes_leaves_ranks_time(tmp_path: Path, number: signal.Signals) -> None:
    """Regression: the launcher's SIGTERM ended the ranks at once, and the signal also ended the fork server."""
    (tmp_path / "script.py").write_text(SAVES)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    process = subprocess.Popen(command, env=mpi.base_environment(), stderr=subprocess.PIPE, start_new_session=True)
    try:
        pids_in(tmp_path, 2)
        for handle in (guardians.ProcessHandle(process.pid), *guardians.open_descendants(process.pid)):
            handle.send(number)
            handle.close()
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        mpi._kill_session(process.pid)
        process.communicate(timeout=TIMEOUT_S)
    assert len(list(tmp_path.glob("*.saved"))) == 2, error.decode()


@pytest.mark.parametrize(
    ("to", "method"),
    [
        pytest.param("terminal", "forkserver", marks=pytest.mark.long),
        pytest.param("terminal", "spawn", marks=pytest.mark.long),
        pytest.param("launcher", "forkserver", marks=pytest.mark.long),
        pytest.param("launcher, SIGTERM", "spawn", marks=pytest.mark.long),
        ("launcher, killed", "forkserver"),
        pytest.param("launcher, killed", "spawn", marks=pytest.mark.long),
    ],
)
def test_no_rank_outlives_its_launcher(tmp_path: Path, method: str, to: str) -> None:
    """Processes that the ranks have started end as well, whether Ctrl-C reaches all of them or the launcher alone.

    Both methods handle a signal to the launcher alone in the same way.
    """
    number = signal.SIGKILL if "killed" in to else signal.SIGTERM if "SIGTERM" in to else signal.SIGINT
    process = start_script(tmp_path, method=method)
    try:
        pids = pids_in(tmp_path, 4)
        outside = [int(path.stem) for path in tmp_path.glob("*.session")]
        if to == "terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(number)
        if "killed" in to:
            wait_gone(pids)
            for pid in outside:  # nothing is left that knows of them
                os.kill(pid, signal.SIGKILL)
        _, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
        assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
        wait_gone(pids + outside)
    finally:
        mpi._kill_session(process.pid)
        process.communicate(timeout=TIMEOUT_S)


def test_a_function_under_the_main_guard_is_refused(tmp_path: Path) -> None:
    """Regression: no child found the function, and the error suggested the guard that the script already had."""
    guard = f"{GUARD}\n    def inside():\n        pass\n\n    ad.launch_subprocesses(inside)\n"
    _, error = start_script(tmp_path, guard=guard).communicate(timeout=TIMEOUT_S)
    assert 'is defined under if __name__ == "__main__":; define it above' in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top": "if __name__ != '__main__': time.sleep(600)", "timeout_s": 1.0}, "rank 0, 1 did not start within 1 s"),
        ({"top": "if __name__ != '__main__': sys.exit(3)"}, "exited with code 3 before its function ran"),
        (
            {"guard": "if True:"},
            "exited with code 1 before its function ran: call launch_subprocesses under if __name__",
        ),
    ],
    ids=["hangs", "exits", "no guard"],
)
@pytest.mark.long
def test_a_rank_that_never_starts_is_explained(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    process = start_script(tmp_path, method="spawn", **options)
    try:
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert words in error


def test_nothing_of_this_is_imported_with_the_package() -> None:
    source = (
        "import sys, asyncdist as ad\n"
        "heavy = {'torch', 'multiprocessing', 'asyncdist.launch.spawn', 'asyncdist.launch.rank_process'}\n"
        "print(sorted(heavy & set(sys.modules)), 'launch_subprocesses' in dir(ad))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert ended.stdout == "[] True\n"


@pytest.mark.long
def test_a_function_of_an_interactive_session_is_refused() -> None:
    source = (
        "import asyncdist as ad\n"
        "def work(): pass\n"
        "try: ad.launch_subprocesses(work, ad.MultiprocessConfig(world_size=2))\n"
        "except TypeError as error: print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-"], input=source, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert "was defined in an interactive session" in ended.stdout


def test_an_event_loop_may_run_while_ranks_do(tmp_path: Path) -> None:
    """The launcher runs in a thread of a program, where signals do not arrive."""

    async def main() -> None:
        await asyncio.to_thread(ad.launch_subprocesses, note_rank, config(), None, 0, str(tmp_path))

    asyncio.run(main())
    assert len(reports(tmp_path)) == 2
