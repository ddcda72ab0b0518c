"""Tests ``tools/hosts``, which runs a command on virtual hosts made of Linux namespaces, and then removes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import hosts
from support.processes import wait_until

#: Sleeping time by which a process is found in a list of all processes.
MARK = f"98765.{os.getpid()}"


def processes() -> list[str]:
    """Return the command lines of all processes that sleep for this time."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        if words[:2] == [b"sleep", MARK.encode()]:
            found.append(path.parent.name)
    return found


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_hosts_have_own_names_addresses_processes_and_memory() -> None:
    # counted by the shell alone: in a pipe, one process may begin before the other
    count = "set -- /proc/[0-9]*; echo \\$#"
    see = f"hostname; getent hosts host2; {count}; ls /dev/shm; touch /dev/shm/\\$(hostname); cat"
    steps = [f'echo $(echo said | ssh -x -o "A b" {host} "{see}")' for host in ("host1", "host2", "host1")]
    script = "; ".join(["touch /dev/shm/login; hostname", *steps, "ssh host3 true; exit 9"])
    result = hosts.run(2, ["sh", "-c", script]).check(9)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["login"]
    # On such a host there are only its first process and the shell.
    assert lines[1:] == [
        ["host1", "10.213.77.2", "host2", "2", "said"],
        ["host2", "10.213.77.2", "host2", "2", "said"],
        ["host1", "10.213.77.2", "host2", "2", "host1", "said"],
    ]
    assert "Could not resolve hostname host3" in result.stderr


SEND = """
import socket, sys, threading, time
NBYTES = 4_000_000
if sys.argv[1] == "serve":
    with socket.create_server(("", 7000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"!")
else:
    with socket.create_connection(("host1", 7000)) as connection:
        began_at = time.monotonic()
        connection.sendall(bytes(NBYTES))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(NBYTES * 8 / 1e6 / (time.monotonic() - began_at))
"""


def test_a_rate_bounds_what_a_host_sends(tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text(SEND)
    program = f"{sys.executable} {tmp_path / 'send.py'}"
    script = f"ssh host1 {program} serve >{tmp_path}/log & "
    script += f"until grep -q ready {tmp_path}/log; do sleep 0.02; done; ssh host2 {program} send"
    mbit_per_s = float(hosts.run(2, ["sh", "-c", script], rate=100).check().stdout)
    assert mbit_per_s < 110, "the rate must be near the limit; the bucket holds another 32 kB"


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    """Start hosts on which processes sleep, some of them in their own sessions and with parents that have ended."""
    if (hosts.run(1, ["true"])).returncodes != (0,):
        pytest.fail("hosts can be made, and the command does not run there")
    sleep = f"sleep {MARK}"
    script = f"""
        ssh host1 {sleep} &
        ssh host2 'setsid {sleep} </dev/null >/dev/null 2>&1 & exit 0'
        setsid {sleep} &
        trap 'echo signalled; exit 5' TERM
        echo ready
        {sleep} & wait
    """
    process = subprocess.Popen(
        hosts.command(2, ["sh", "-c", script]), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert wait_until(lambda: len(processes()) == 4)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_nothing_stays_behind_however_it_ends(started: subprocess.Popen[str], number: int, code: int) -> None:
    # The first test's hosts have vanished before this test's hosts were made, so these are the machine's own links.
    before = links()
    started.send_signal(number)
    out, _ = started.communicate(timeout=30)
    assert started.returncode == code
    assert out == ("signalled\n" if number == signal.SIGTERM else "")
    assert wait_until(lambda: not processes())
    assert links() == before and "bridge" not in before
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert names == ""


def refusal(*words: str, path: Path | None = None, before: Sequence[str] = ()) -> tuple[int, str]:
    """Return how ``tools/hosts`` ends, and its last line."""
    environ = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path is not None else None
    command = [*before, sys.executable, str(hosts.PROGRAM), *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30, check=False)
    assert ended.stdout == "" and "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0", "true"], "argument N: '0' is not a whole number from 1 to 64"),
        (["two", "true"], "argument N: 'two' "),
        (["2"], "a command is needed"),
        (["2", "--rate", "-5", "true"], "argument --rate: '-5' "),
        (["2", "no-such-program"], "there is no program 'no-such-program'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_is_one_line(words: list[str], message: str) -> None:
    code, line = refusal(*words)
    assert code == 2 and message in line


def test_a_missing_requirement_is_named_with_its_own_exit_code(tmp_path: Path) -> None:
    hosts.run(1, ["true"]).check()  # skipped if the machine itself lacks something
    capability = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    assert refusal("1", "true", before=capability) == (
        hosts.UNAVAILABLE,
        "tools/hosts: namespaces are not available here: Operation not permitted",
    )
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    fake.chmod(0o755)
    code, line = refusal("1", "--rate", "100", "true", path=tmp_path)
    assert code == hosts.UNAVAILABLE
    assert line.startswith("tools/hosts: hosts cannot be made here: tc qdisc add dev port1 root tbf rate 100mbit")
    assert line.endswith("Error: Specified qdisc kind is unknown.")


def test_only_root_may_make_hosts() -> None:
    code = f"import os, runpy; os.geteuid = lambda: 1000; runpy.run_path({str(hosts.PROGRAM)!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", code, "1", "true"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stderr) == (77, "tools/hosts: only root may make namespaces\n")
