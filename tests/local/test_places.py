"""Tests free ranks without a process: how processes claim and fill them, on stores in one process."""

from __future__ import annotations

import io
import json
import os
import queue
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.facts import names, naming
from torch.distributed import HashStore

from asyncdist import cli, environment, rank_program
from asyncdist.errors import LateError, TransportError
from asyncdist.launch import joining_ranks, local_ranks, place_claims
from asyncdist.launch.place_claims import ClaimError, claim, keep
from asyncdist.launch.supervision.endings import describe_end
from asyncdist.launch.supervision.supervisor import Event, Supervisor
from asyncdist.launchers import addresses, detection, job_rendezvous
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.local_host import LaunchError
from asyncdist.transports.torch_distributed.meeting import newcomers, rendezvous
from asyncdist.transports.torch_distributed.meeting.newcomers import WorldEntry
from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
from asyncdist.transports.torch_distributed.transport import TorchTransport
from asyncdist.trust.job_secret import JobSecret

#: A generous limit in seconds: a longer wait is a hang.
TIMEOUT_S = 60.0
VERSION = "1.2"


def job_of(states: list[str], version: str = VERSION) -> HashStore:
    """Return the store of a job whose places have these states."""
    store = HashStore()
    for rank, state in enumerate(states):
        store.set(f"place/{rank}", state)
    store.set(place_claims.JOB, place_claims.describe("a job", len(states), 2, version, host=""))
    return store


def states_of(store: Any) -> list[str]:
    size = json.loads(store.get(place_claims.JOB))["size"]
    return [bytes(store.get(f"place/{rank}")).decode() for rank in range(size)]


# -- claims -----------------------------------------------------------------------------------------------------------


def test_lowest_free_places_are_taken_even_if_given_up_before() -> None:
    store = job_of(["held", "free 3", "left", "free 1", "free 1"])
    found = claim(store, 2, VERSION)
    assert found == {
        "job": "a job",
        "size": 5,
        "empty_count": 2,
        "version": VERSION,
        "host": "",
        "is_open": False,
        "places": [(1, 3), (3, 1)],
    }
    assert claim(store, 1, VERSION)["places"] == [(4, 1)]
    assert [state.partition(" ")[0] for state in states_of(store)] == ["held", "held", "left", "held", "held"]


@pytest.mark.parametrize(
    "store, says",
    [
        (job_of(["held", "free 4", "left"]), "-n must be <= 1, the number of free places of the job's 3, got 2"),
        (
            job_of(["held", "left"]),
            "none of the job's 2 places is free: wait until a joined rank fails, or start a job with more --places",
        ),
        (
            job_of(["free 1"] * 3, "1.1"),
            "this asyncdist must have the job's version 1.1, got 1.2; install that version",
        ),
        (HashStore(), "no job that was started by `asyncdist run --places` listens at this address"),
    ],
)
def test_where_too_few_can_be_taken_none_are(store: HashStore, says: str) -> None:
    before = states_of(store) if store.check([place_claims.JOB]) else []
    with pytest.raises(ClaimError) as refused:
        claim(store, 2, VERSION)
    assert str(refused.value) == says
    assert before == (states_of(store) if before else [])


def test_nobody_takes_places_of_a_job_that_is_over() -> None:
    store = job_of(["free 1"])
    store.set(place_claims.OVER, "")
    with pytest.raises(ClaimError, match="ended"):
        claim(store, 1, VERSION)


def test_a_place_that_another_one_takes_first_is_not_taken_twice() -> None:
    store = job_of(["free 1", "free 1"])

    class Rival:
        """Takes place 0 between two reads of the other process."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if key == "place/0":
                store.set(key, "held by a rival")
            return bytes(store.compare_set(key, expected, desired))

    assert claim(Rival(), 1, VERSION)["places"] == [(1, 1)]
    assert states_of(store)[0] == "held by a rival"


@pytest.mark.parametrize("moves_off", [True, False])
def test_of_two_that_take_some_of_the_free_places_each_one_wins(
    moves_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two processes that claimed free ranks at once were both refused."""
    store = job_of(["held", "free 1", "free 2"])
    store.set("place/2", "held by a rival")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert states_of(store)[1] == "free 1", "a process must return a taken place before it pauses"
        if moves_off:
            store.set("place/2", "free 2")

    monkeypatch.setattr(place_claims.time, "sleep", pause)
    if moves_off:
        assert claim(store, 2, VERSION)["places"] == [(1, 1), (2, 2)]
        assert len(pauses) == 1
    else:
        with pytest.raises(ClaimError, match=naming(1, 3)):
            claim(store, 2, VERSION)
        assert 1 < len(pauses) < 10


class Closes:
    """A store that closes at the first request."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def check(self, _: object) -> bool:
        raise RuntimeError("Broken pipe")


class Refuses:
    """A store that refuses new connections."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("refused")


@pytest.mark.parametrize("kind", [Closes, Refuses])
def test_store_that_closes_during_the_call_means_the_job_is_over(
    kind: type, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: the error said that the address is not a store's."""
    monkeypatch.setattr("torch.distributed.TCPStore", kind)
    place_claims.main("127.0.0.1", 1, 1, VERSION)  # no process listens at this address
    assert json.loads(capfd.readouterr().out) == {"error": "the job has ended"}


def test_places_of_a_launcher_killed_during_the_claim_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the process that had claimed a place failed to report it, and no rank could take the place again."""
    common = HashStore()
    store = SealedStore(common, JobSecret(b"k" * 16).at_port(1)).part("asyncdist")
    for rank, state in enumerate(["held", "free 1"]):
        store.set(f"place/{rank}", state)
    store.set(place_claims.JOB, place_claims.describe("a job", 2, 1, VERSION, host=""))
    monkeypatch.setenv("ASYNCDIST_JOB_SECRET", "k" * 16)
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: common)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before, (unread, written) = os.dup(1), os.pipe()
    os.close(unread)
    os.dup2(written, 1)
    try:
        monkeypatch.setattr("sys.stdout", os.fdopen(1, "w", closefd=False))
        place_claims.main("127.0.0.1", 1, 1, VERSION)
    finally:
        os.dup2(before, 1)
    os.close(before)
    os.close(written)
    assert states_of(store) == ["held", "free 2"]


def test_places_of_a_silent_launcher_are_free_once_it_has_ended() -> None:
    """The launcher was killed: rank 1 was in its second process, rank 2 in its first; 3 and 4 had ended."""
    store = job_of(["held"] * 5)
    lines = ["exited/1.3 ", "exited/3.1 ", "place/3 free 2", "place/4 left"]
    keep(store, [(1, 3), (2, 1), (3, 1), (4, 1)], [f"asyncdist/{line}\n" for line in lines])
    assert states_of(store) == ["held", "free 5", "free 2", "free 2", "left"]
    assert store.check(["exited/1.4", "exited/2.1", "exited/3.1"])
    assert not store.check(["exited/4.1"])


# -- launchers --------------------------------------------------------------------------------------------------------


def test_ranks_of_a_world_with_places_know_its_size_and_starters() -> None:
    made = local_ranks.build_environments({}, ranks=2, threads=None, places=4)
    places = [job_rendezvous.torch_rendezvous(each) for each in made]
    assert [(place.rank, place.size, place.empty_count, place.incarnation) for place in places] == [
        (0, 4, 2, 0),
        (1, 4, 2, 0),
    ]
    assert all(place.admits_restarted and place.is_store_served for place in places)
    (nested,) = local_ranks.build_environments(made[0], ranks=1, threads=None)
    assert job_rendezvous.torch_rendezvous(nested).empty_count == 0, (
        "a job that a rank starts must not join the outer job"
    )
    nested = {**made[0], "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"}  # as torchrun sets them
    nested |= {"ASYNCDIST_INCARNATION": "2", "ASYNCDIST_LOOPBACK": "0"}
    place = job_rendezvous.torch_rendezvous(nested)
    assert (place.empty_count, place.incarnation, place.admits_restarted, place.is_loopback) == (0, 0, False, True)
    described = place_claims.describe(places[0].job, 4, 2, VERSION, host=addresses.describe_host())
    job = {**json.loads(described), "places": [(1, 5), (3, 1)]}
    joined = joining_ranks.build_environments({"RANK": "9"}, job, host="localhost", port=123, threads=None)
    coming = {rank: job_rendezvous.torch_rendezvous(each) for rank, each in joined.items()}
    assert [(place.rank, place.size, place.empty_count, place.incarnation) for place in coming.values()] == [
        (1, 4, 2, 5),
        (3, 4, 2, 1),
    ]
    assert list(coming) == [1, 3]
    assert {(place.address, place.port, place.job) for place in coming.values()} == {("localhost", 123, job["job"])}
    assert detection.detect(joined[3]).rank == 3
    assert [detection.local_rank(each) for each in joined.values()] == [1, 3], "ranks of a host must not share a GPU"
    by_name = joining_ranks.build_environments({}, job, host="host1", port=123, threads=None)
    assert [detection.local_rank(each) for each in by_name.values()] == [1, 3], "the host may have been named"
    elsewhere = joining_ranks.build_environments({}, {**job, "host": "host1"}, host="host1", port=123, threads=None)
    assert [detection.local_rank(each) for each in elsewhere.values()] == [0, 1]


@pytest.mark.parametrize(
    "options, says",
    [
        (["-n", "2", "--places", "4"], "--places needs --transport torch, got --transport mpi"),
        (["--join", "h:1", "--transport", "mpi"], "--join needs --transport torch, got --transport mpi"),
        (
            ["-n", "2", "--places", "4", "--survive"],
            "--survive needs --transport mpi and --places needs --transport torch, got --transport mpi",
        ),
        (["--join", "h:1", "--survive"], "--survive needs --transport mpi"),
        (["--join", "h:1", "--mpi", "mpich"], "--mpi needs --transport mpi"),
        (["--hosts", "h:2", "--places", "4", "--transport", "torch"], "--places cannot be used with --hosts"),
        (["--hosts", "h:2", "--join", "h:1"], "--join cannot be used with --hosts"),
        (["-n", "3", "--places", "2", "--transport", "torch"], "--places must be >= 3 with -n 3, got 2"),
        (["-n", "1", "--places", "10001", "--transport", "torch"], "--places must be <= 10000, got 10001"),
        (["--places", "2", "--join", "h:1"], "--places cannot be used with --join"),
        (["--join", "29500"], "--join must be HOST:PORT as asyncdist run --places printed it, got '29500'"),
        (["--join", "h:99999"], "--join must be HOST:PORT as asyncdist run --places printed it, got 'h:99999'"),
        (["--join", "127.0.0.1:1"], "--join 127.0.0.1:1: cannot connect to the job's launcher ("),
    ],
)
def test_what_cannot_be_is_one_line(
    options: list[str], says: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNCDIST_TRANSPORT", raising=False)
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *options, str(script)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"asyncdist run: {says}") and said.count("\n") == 1


def test_a_job_is_joined_by_its_secret_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: without a secret, the command trusted any process that served a store with a job's values."""
    monkeypatch.setattr(environment, "secret_directories", lambda: [str(tmp_path)])
    started: list[object] = []
    monkeypatch.setattr(joining_ranks, "_start_keeper", lambda *words: started.append(words))
    script = tmp_path / "script.py"
    script.touch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            cli.main(["run", "--join", address, str(script)])
    assert ended.value.code == 2 and not started
    said = capsys.readouterr().err
    assert said.startswith(f"asyncdist run: --join {address}: this host has no secret of a job at that port")
    assert "ASYNCDIST_JOB_SECRET_FILE" in said and said.count("\n") == 1


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SealedStore:
    """Return the part of a store that belongs to a job, which all processes of a test share."""
    common = HashStore()
    sealed = SealedStore(common, JobSecret())
    monkeypatch.setattr(newcomers, "open_store", lambda *_: sealed)
    monkeypatch.setattr(rendezvous._RendezvousStore, "_find", lambda *_: common)
    monkeypatch.setattr(newcomers, "_record_end", lambda *_: None)
    monkeypatch.setattr(newcomers, "_entered", {})
    rendezvous._store_of.cache_clear()
    return sealed.part("asyncdist")


def place(rank: int, incarnation: int = 0, *, size: int = 3, empty_count: int = 2) -> TorchRendezvous:
    return TorchRendezvous(
        rank, size, "127.0.0.1", 29500, True, incarnation, admits_restarted=True, job="a job", empty_count=empty_count
    )


class Process:
    """One process in a world: its way into the world, and its connections."""

    def __init__(self, where: TorchRendezvous) -> None:
        entry = self.entry = WorldEntry(where, TIMEOUT_S)
        self.transport = TorchTransport(entry.groups, where.rank, where.size, entry)

    def until(self, is_true: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < give_up_at, "the processes did not finish in time"
            self.transport._callbacks.empty()
            time.sleep(0.01)


def in_thread(make: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call ``make`` in a thread; the list contains its result or its error once the thread has ended."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, made


def test_lone_rank_starts_a_world_that_newcomers_find(store: SealedStore) -> None:
    first = Process(place(0))
    assert (first.entry.groups, first.entry.incarnation) == ([], 0)
    assert first.transport.lost_ranks() == first.transport.vacant_ranks() == {1, 2}
    processes = {0: first}
    try:
        for rank in (2, 1):
            thread, made = in_thread(lambda rank=rank: Process(place(rank, 1)))
            first.until(lambda thread=thread: not thread.is_alive())
            assert isinstance(made[0], Process), made
            newcomer = processes[rank] = made[0]
            assert newcomer.entry.incarnation == 1
            assert newcomer.transport.vacant_ranks() == {1, 2} - set(processes), (
                "the newcomer must know which other places are occupied"
            )
            for peer, process in processes.items():
                if peer != rank:
                    process.until(lambda process=process, rank=rank: rank in process.transport._connected)
                    assert process.transport.accept(rank, 1)
                    newcomer.until(lambda newcomer=newcomer, peer=peer: peer in newcomer.transport._connected)
                    assert newcomer.transport.accept(peer, process.entry.incarnation)
        assert all(
            not process.transport.lost_ranks() and not process.transport.vacant_ranks()
            for process in processes.values()
        )
        assert not store.check(["over"])
    finally:
        threads = [threading.Thread(target=process.transport.close) for process in processes.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_second_process_with_a_living_rank_is_refused_at_once(store: SealedStore) -> None:
    """Regression: the second process waited until the start timed out, although the others had begun long before."""
    begun = Process(place(0))
    newcomers._entered.clear()  # cleared, because the second process stands for a new process
    with pytest.raises(TransportError, match=r"already has a rank 0 .* with which its world began"):
        WorldEntry(place(0), TIMEOUT_S)
    begun.transport.close()


def test_process_at_an_empty_place_waits_for_the_next_world(store: SealedStore) -> None:
    """All ranks have left the running world; the rank that begins the next world finds this process waiting."""
    left = Process(place(0))
    left.transport.close()
    thread, made = in_thread(lambda: Process(place(1, 1)))
    while not store.check([f"{store.get('running')[11:27].decode()}/newcomer/1"]):
        assert thread.is_alive(), made
    assert not made
    rendezvous._store_of.cache_clear()
    processes = [Process(place(0))]
    processes[0].until(lambda: not thread.is_alive())
    processes.append(made[0])
    assert processes[1].entry.nonce == processes[0].entry.nonce != left.entry.nonce
    for process in processes:
        process.transport.close()


@pytest.mark.parametrize(
    "key, says",
    [("ended/0", "rank 2 joins the others, and other ranks have ended"), ("over", "rank 2 joins the others, and the")],
)
def test_a_process_that_comes_when_the_job_is_over_ends_well(store: SealedStore, key: str, says: str) -> None:
    store.set("ended/1", "")  # a later process of that rank has ended, so the world may begin without it
    thread, made = in_thread(lambda: WorldEntry(place(2, 1), TIMEOUT_S))
    thread.join(0.3)
    assert thread.is_alive()
    store.set(key, "")
    thread.join(TIMEOUT_S)
    assert isinstance(made[0], LateError) and made[0].message.startswith(says)


def test_a_process_that_finds_the_store_closed_ends_well(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise TransportError("nobody serves a store there")

    monkeypatch.setattr(newcomers, "open_store", closed)
    with pytest.raises(LateError, match="rank 2 joins the others, and the store of the job has closed"):
        WorldEntry(place(2, 1), TIMEOUT_S)
    with pytest.raises(TransportError, match="nobody serves"):
        WorldEntry(place(0), TIMEOUT_S)


# -- supervision ------------------------------------------------------------------------------------------------------


class Keeper:
    """Replaces the process that sets keys of the store."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stdin = self

    def write(self, line: bytes) -> None:
        self.said.append(line.decode().removeprefix("asyncdist/").rstrip("\n"))

    def flush(self) -> None:
        pass


class Rank:
    """A process of one rank, which ends when the test ends it."""

    is_lost = False

    def __init__(self, rank: int, events: Any) -> None:
        self.rank, self.events = rank, events
        self.returncode: int | None = None
        self.signals: list[int] = []

    def ends(self, returncode: int) -> None:
        self.returncode = returncode
        self.events.put(("ended", self.rank))

    def send_signal(self, number: int, /) -> None:
        self.signals.append(number)

    def end(self) -> None:
        if self.returncode is None:
            self.ends(-9)


class Supervised:
    """Ranks that a launcher supervises, and the notices that it has written to the store."""

    def __init__(self, ranks: dict[int, int], count: int = 0, *, have_joined: bool) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.keeper = Keeper()
        self.started: list[tuple[int, str]] = []
        self.is_memory_short = False
        environments = {rank: {environment.INCARNATION_VARIABLE: str(number)} for rank, number in ranks.items()}
        self.processes = {rank: Rank(rank, self.events) for rank in ranks}
        self.supervisor = Supervisor(
            self.events,
            self._start,
            environments,
            restarts=count,
            store=self.keeper,  # type: ignore[arg-type]
            is_open=True,
            have_joined=have_joined,
        )
        self.supervisor.processes = self.processes

    def _start(self, rank: int, variables: Mapping[str, str]) -> Rank:
        if self.is_memory_short:
            raise LaunchError(f"rank {rank} cannot be started: no memory")
        self.started.append((rank, variables[environment.INCARNATION_VARIABLE]))
        process = Rank(rank, self.events)
        process.ends(0)
        return process

    def run(self) -> int:
        return self.supervisor.supervise()


def test_place_is_free_if_its_killed_rank_is_not_restarted() -> None:
    job = Supervised({0: 0, 1: 0}, have_joined=False)
    job.processes[1].ends(-9)
    job.processes[0].ends(0)
    assert job.run() == 0 and not job.started, "the job must continue, and end without an error"
    assert job.keeper.said == ["exited/1.0 ", "place/1 free 1", "exited/0.0 ", "place/0 left"]


def test_the_printed_command_to_join_can_be_pasted() -> None:
    """Regression: a script's path with a space was printed without quotes, and its arguments were not printed."""
    store, variables = Keeper(), {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    local_ranks._announce_places(store, variables, 1, 2, ["my train.py", "--lr", "1"], is_open=False)  # type: ignore[arg-type]
    command = store.said[-1].partition("to join, run: ")[2]
    assert shlex.split(command) == ["asyncdist", "run", "--join", "127.0.0.1:9", "my train.py", "--lr", "1"]


@pytest.mark.parametrize(("module", "first"), [("", ["script.py"]), ("package.train", ["-m", "package.train"])])
def test_the_printed_command_runs_the_same_program(
    module: str, first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it had the path of a module instead of -m, and no arguments."""
    programs: list[list[str]] = []
    monkeypatch.setattr(local_ranks, "_store", lambda *words, is_open: programs.append(words[3]))
    monkeypatch.setattr(local_ranks, "run_ranks", lambda *_, **__: 0)
    environ = {rank_program.MODULE_VARIABLE: module}
    assert local_ranks.run("script.py", ["--lr", "1"], ranks=1, places=2, environ=environ) == 0
    assert programs == [[*first, "--lr", "1"]]


def test_a_launcher_whose_store_has_ended_restarts_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it printed nothing, and a restarted rank waited 300 s for the store."""
    job = Supervised({0: 0, 1: 0}, 1, have_joined=False)
    job.events.put(("store", -9))
    job.processes[1].ends(-9)
    job.processes[0].ends(0)
    assert job.run() == 0 and not job.started
    first, *_ = capsys.readouterr().err.splitlines()
    assert names(first, "the store", describe_end(-9))


@pytest.mark.parametrize("have_joined", [False, True])
def test_a_restart_that_fails_ends_no_healthy_job(capsys: pytest.CaptureFixture[str], *, have_joined: bool) -> None:
    """Regression: if fork() found no memory, the error killed the other ranks."""
    job = Supervised({0: 0, 1: 0, 2: 0}, 3, have_joined=have_joined)
    job.is_memory_short = True
    job.processes[1].ends(-9)
    job.processes[0].ends(0)
    job.processes[2].ends(0)
    assert job.run() == (137 if have_joined else 0) and not job.processes[2].signals
    assert job.keeper.said[:2] == ["exited/1.0 ", "place/1 free 1"]
    _, second = capsys.readouterr().err.splitlines()
    assert names(second, "rank 1", "no memory")


def test_launcher_asked_for_a_report_forwards_it_to_its_ranks() -> None:
    job = Supervised({0: 0, 1: 0}, have_joined=False)
    job.events.put(("signal", signal.SIGUSR1))
    for process in job.processes.values():
        process.ends(0)
    assert job.run() == 0
    assert [process.signals for process in job.processes.values()] == [[signal.SIGUSR1]] * 2


def test_last_rank_of_the_first_launcher_decides_its_exit_code() -> None:
    job = Supervised({0: 0, 1: 0}, have_joined=False)
    job.processes[1].ends(-9)
    job.processes[0].ends(-9)
    assert job.run() == 137


def test_joined_ranks_restart_in_their_places_and_keep_counting() -> None:
    job = Supervised({2: 4, 3: 1}, 1, have_joined=True)
    job.processes[2].ends(-9)
    job.processes[3].ends(1)
    assert job.run() == 1, "the other ranks decide whether the loss is a failure of the job"
    assert job.started == [(2, "5")]
    assert job.keeper.said == ["exited/2.4 ", "exited/3.1 ", "place/3 free 2", "exited/2.5 ", "place/2 left"]


def test_last_joined_rank_restarts_if_ranks_live_elsewhere() -> None:
    job = Supervised({2: 1}, 1, have_joined=True)
    job.processes[2].ends(-9)
    assert job.run() == 0 and job.started == [(2, "2")]


def test_signal_to_joined_ranks_makes_them_lost_and_not_failed() -> None:
    job = Supervised({2: 1, 3: 1}, have_joined=True)
    job.events.put(("signal", 2))
    assert job.run() == 130
    assert not any(process.signals for process in job.processes.values())
    assert sorted(job.keeper.said) == ["exited/2.1 ", "exited/3.1 "], "the keeper must free the places"
