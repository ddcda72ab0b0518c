"""Tests jobs on several hosts: where ranks are placed, which variables they get, and mpirun's arguments for both."""

from __future__ import annotations

import queue
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from asyncdist import cli, local_host
from asyncdist.launch import guardians, mpirun
from asyncdist.launch.hosts import remote_hosts, remote_ranks
from asyncdist.launch.hosts.remote_hosts import Host, RemoteRank
from asyncdist.launch.supervision.supervisor import Event, Supervisor

HOSTS = [Host("a", 2), Host("user@b", 1)]


def test_hosts_are_names_with_numbers_of_ranks() -> None:
    assert remote_hosts.parse_hosts("a:2,user@b") == HOSTS
    assert [host.address for host in HOSTS] == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["", "a,", "a:0", "a:-1", "a:x", "a:1:2", ":4", "a b", "-oProxyCommand=x", "a;b", "a:", "$(a)"]
)
def test_what_is_no_list_of_hosts_is_named(text: str) -> None:
    with pytest.raises(
        local_host.LaunchError, match="--hosts must be NAME:RANKS as in a:4,b:4, got .*" + re.escape(repr(text))
    ):
        remote_hosts.parse_hosts(text)


def test_a_host_is_named_once() -> None:
    with pytest.raises(local_host.LaunchError, match="--hosts must name each host once, got 'a' twice"):
        remote_hosts.parse_hosts("a:1,b:1,a:2")


@pytest.mark.parametrize(
    ("ranks", "placed"),
    [(None, [("a", 2), ("user@b", 1)]), (3, [("a", 2), ("user@b", 1)]), (2, [("a", 2)]), (1, [("a", 1)])],
)
def test_ranks_fill_the_hosts_in_their_order(ranks: int | None, placed: list[tuple[str, int]]) -> None:
    assert remote_hosts.place_ranks(HOSTS, ranks) == [Host(*words) for words in placed]


def test_too_few_slots_are_counted() -> None:
    with pytest.raises(
        local_host.LaunchError, match=re.escape("-n must be <= 3, the number of slots of --hosts a:2,user@b:1, got 5")
    ):
        remote_hosts.place_ranks(HOSTS, 5)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no-such-ssh -x", "no program 'no-such-ssh'"),
        ("", "no program is named"),
        (" ", "no program is"),
        ("a 'b", "No closing"),
    ],
)
def test_an_ssh_that_is_not_there_is_named(command: str, problem: str) -> None:
    with pytest.raises(
        local_host.LaunchError, match="--ssh must be .*, got " + re.escape(f"{command!r}: ") + f".*{problem}"
    ):
        remote_hosts.split_ssh(command)


def test_no_ssh_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a dot in PATH, another user's program in a shared folder ran."""
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "ssh", tmp_path / "own" / "ssh"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f".:{tmp_path / 'own'}")
    assert remote_hosts.split_ssh("ssh -x") == [str(tmp_path / "own" / "ssh"), "-x"]
    assert remote_hosts.split_ssh("./ssh") == ["./ssh"], "a program that the user has named must be kept"


def test_an_environment_travels_without_what_is_about_this_host() -> None:
    here = {"HOSTNAME": "x", "SSH_AUTH_SOCK": "x", "TERM": "x", "DISPLAY": "x", "BASH_FUNC_f%%": "() { x; }", "_": "x"}
    rest = {"PATH": "p", "WANDB_API_KEY": "k", "OMP_NUM_THREADS": "3"}
    rest |= {"_OWN": "o", "TERMS": "t", "HOSTNAMES": "h", "PWD_FILE": "f"}  # begin like the removed variables
    assert remote_hosts.travelling({**here, **rest}) == rest


class Agent:
    """Replaces a host's agent that has reported its cores and port."""

    def __init__(self, host: Host, cores: int) -> None:
        self.host, self.cores, self.port = host, cores, 1000 + cores


def test_each_rank_is_told_its_place() -> None:
    agents = [Agent(Host("user@a", 2), 8), Agent(Host("b", 1), 2)]
    found = remote_ranks.build_environments({"RANK": "7", "KEPT": "k"}, agents, threads=None)  # type: ignore[arg-type]

    def column(name: str) -> list[str]:
        return [environ[name] for environ in found]

    assert [column(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")] == [
        ["0", "1", "2"], ["3"] * 3, ["0", "1", "0"], ["2", "2", "1"], ["0", "0", "1"]
    ]  # fmt: skip
    assert set(column("MASTER_ADDR")) == {"a"} and set(column("MASTER_PORT")) == {"1008"}
    assert column("OMP_NUM_THREADS") == ["4", "4", "2"] and column("KEPT") == ["k"] * 3
    assert len(set(column("TORCHELASTIC_RUN_ID"))) == 1


class Orders:
    """Replaces a host's agent that keeps the orders that it gets."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send(self, *, number: int = 0, **_: object) -> None:
        self.signals += [number] * bool(number)


@pytest.mark.parametrize(("returncode", "code", "signals"), [(None, 255, []), (255, 255, [signal.SIGTERM] * 2)])
def test_a_lost_host_does_not_stop_the_other_ranks(returncode: int | None, code: int, signals: list[int]) -> None:
    """Regression: when ssh noticed a lost host, after minutes, its ranks counted as failed, and the others ended."""
    agent, events = Orders(), queue.SimpleQueue[Event]()
    ranks = {rank: RemoteRank(agent, rank, partial(events.put, ("ended", rank))) for rank in range(3)}  # type: ignore[arg-type]
    if returncode is None:
        ranks[1].note_loss()
    else:
        ranks[1].note_end(returncode)
    for rank in (0, 2):
        ranks[rank].returncode = 0
        events.put(("ended", rank))
    assert Supervisor(events, lambda rank, _: ranks[rank], {rank: {} for rank in ranks}).run() == code
    assert agent.signals == signals


def test_open_mpi_is_told_of_hosts_and_variables() -> None:
    variables = ["A", "OMPI_MCA_osc", "PATH"]
    command = mpirun.build_command("openmpi", "mpirun", "x.py", [], ranks=3, hosts=HOSTS, variables=variables)
    options = " ".join(command).partition(guardians.guarded(["x"])[0])[0]
    assert options == "mpirun -n 3 --host a:2,user@b:1 --bind-to none --map-by slot -x A -x PATH "
    settings = mpirun.ssh_settings("openmpi", ["ssh", "-p", "22"])
    assert settings["PRTE_MCA_plm_ssh_agent"] == settings["OMPI_MCA_plm_rsh_agent"] == "ssh -p 22"


def test_mpich_is_told_of_hosts_and_variables() -> None:
    command = mpirun.build_command("mpich", "mpirun", "x.py", [], ranks=3, hosts=HOSTS, variables=["A", "PATH"])
    options = " ".join(command).partition(guardians.guarded(["x"])[0])[0]
    assert options == "mpirun -n 3 -hosts a:2,user@b:1 -genvlist A,PATH "
    assert mpirun.ssh_settings("mpich", ["sh", "-p", "22"]) == {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": shutil.which("sh"),
        "HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "--ssh", "ssh"], "--ssh needs --hosts"),
        (["--hosts", "a:x"], "'a:x'"),
        (["--hosts", "a:2", "-n", "3"], "-n must be <= 2"),
        (["--hosts", "a:2", "--restarts", "1", "--transport", "torch"], "--restarts"),
        (["--hosts", "a:2", "--ssh", "no-such-ssh"], "there is no program 'no-such-ssh'"),
        (
            ["--hosts", "a:2", "--ssh", ""],
            "--ssh must be a command that takes a host and a command line as ssh does, got '': no program",
        ),
        (["-n", "2", "--transport", ""], "--transport must be one of 'mpi', 'torch'"),
        (["-n", "2", "--record", ""], "--record: the folder must have a name, got ''"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *words, "x.py"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1
