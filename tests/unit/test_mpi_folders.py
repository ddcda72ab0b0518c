"""Tests the private folders of an Open MPI job: who can enter them, and which settings name them."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from asyncdist.launch import guardians, live_table
from asyncdist.trust import mpi_folders, private_folders
from asyncdist.trust.mpi_folders import MpiFolders
from asyncdist.trust.private_folders import TemporaryFolder

MPIRUN = "PRTE_MCA_prte_local_tmpdir_base"
DAEMONS = "PRTE_MCA_prte_remote_tmpdir_base"
MEMORY = "OMPI_MCA_btl_sm_backing_directory"
TOKEN = "reports-of-job-1" + "files-of-job---1" + "memory-of-job--1"


@pytest.fixture
def bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the folders in which a host's folders are made: for files and for memory."""
    bases = tmp_path / "files", tmp_path / "memory"
    for base in bases:
        base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(bases[0]))
    monkeypatch.setattr(mpi_folders, "_MEMORY", str(bases[1]))
    return bases


def test_only_this_user_can_enter_the_folders(bases: tuple[Path, Path]) -> None:
    with mpi_folders.kept(TOKEN) as folders:
        made = [Path(folders.files), Path(folders.memory)]
        assert [path.parent for path in made] == list(bases)
        assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o700]
        (made[0] / "left").touch()
        assert MpiFolders.make(TOKEN) == folders, (
            "two hosts that share a folder for temporary files must be able to make it"
        )
    assert [list(base.iterdir()) for base in bases] == [[], []]


def test_a_folder_is_locked_even_if_a_job_looks_at_it(
    bases: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was not locked if another job, which looked for folders of killed jobs, had just locked it."""
    flock, ends = fcntl.flock, []

    def flock_after_a_look(descriptor: int, operation: int) -> None:
        if not ends:
            look = os.open(next(bases[0].iterdir()), os.O_RDONLY)
            flock(look, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ends.append(threading.Timer(0.05, os.close, [look]))
            ends[0].start()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_a_look)
    folder = TemporaryFolder.make(str(bases[0]), "asyncdist-mpi-", "new")
    ends[0].join()
    os.utime(folder.path, (0, 0))
    TemporaryFolder.make(str(bases[0]), "asyncdist-mpi-", "newer").remove()
    assert Path(folder.path).is_dir()
    folder.remove()


def test_the_next_job_removes_folders_of_killed_jobs(bases: tuple[Path, Path]) -> None:
    """Regression: if ``asyncdist run`` was killed, its ranks' shared memory stayed in ``/dev/shm`` until a reboot."""
    hour_ago = time.time() - 3600
    with mpi_folders.kept("r" * 48) as running:
        for base in bases:
            for name in ("killed", "new", "shared"):
                (base / f"asyncdist-mpi-{name}").mkdir(mode=0o700)
                (base / f"asyncdist-mpi-{name}" / "sm_segment").touch()
            (base / "asyncdist-mpi-shared").chmod(0o755)
            (base / "asyncdist-mpi-file").touch()
            for name in ("killed", "shared", "r" * 16, "file"):
                os.utime(base / f"asyncdist-mpi-{name}", (hour_ago, hour_ago))
        with mpi_folders.kept("n" * 48):
            for base in bases:
                left = {path.name.removeprefix("asyncdist-mpi-") for path in base.iterdir()}
                assert left == {"r" * 16, "new", "shared", "file", "n" * 16}
        assert Path(running.files).is_dir()


def test_the_next_live_table_removes_a_killed_ones_folder(bases: tuple[Path, Path]) -> None:
    """Regression: the folder of a killed ``asyncdist run --live`` stayed."""
    killed = bases[0] / "asyncdist-live-killed"
    killed.mkdir(mode=0o700)
    (killed / "0.123").touch()
    os.utime(killed, (0, 0))
    with live_table._counters_folder() as own:
        assert [str(path) for path in bases[0].iterdir()] == [own]
    assert not list(bases[0].iterdir())


def test_a_folder_that_others_can_enter_is_not_used(bases: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    for base, name in zip(bases, (TOKEN[16:32], TOKEN[32:]), strict=True):
        (base / f"asyncdist-mpi-{name}").mkdir()
        (base / f"asyncdist-mpi-{name}").chmod(0o777)
    assert MpiFolders.make(TOKEN) == MpiFolders("", "")
    assert caplog.text.count("other users may enter it; Open MPI uses a folder with a predictable name") == 2


def test_one_folder_does_not_tell_the_names_of_the_others(bases: tuple[Path, Path]) -> None:
    """Regression: a user who saw the job's folder in /tmp made the one in /dev/shm first, and it was not used."""
    token = mpi_folders.draw_token()
    with mpi_folders.kept(token) as folders:
        ends = [Path(folder).name.removeprefix("asyncdist-mpi-") for folder in (folders.files, folders.memory)]
    ends.append(guardians.reports_path(token).removeprefix(guardians.REPORTS_FOLDER).partition("-")[0])
    assert sorted(ends) == sorted(token[first : first + 16] for first in (0, 16, 32))


def test_each_setting_names_a_folder_that_all_hosts_have() -> None:
    own = MpiFolders("/own", "/shm")
    alone = mpi_folders.settings(own)
    assert (alone[MPIRUN], alone[MEMORY]) == ("/own", "/shm") and DAEMONS not in alone
    equal = mpi_folders.settings(own, [MpiFolders("/there", "/memory")] * 2)
    assert (equal[MPIRUN], equal[DAEMONS], equal[MEMORY]) == ("/own", "/there", "/memory")
    different = mpi_folders.settings(own, [MpiFolders("/there", "/memory"), MpiFolders("/here", "")])
    assert different[MPIRUN] == "/own" and not {DAEMONS, MEMORY} & different.keys()
    assert mpi_folders.settings(MpiFolders("", "")) == {}


def test_a_nested_job_does_not_use_the_outer_jobs_folders() -> None:
    outer = mpi_folders.settings(MpiFolders("/tmp/asyncdist-mpi-1", "/dev/shm/asyncdist-mpi-1"))
    users = {MEMORY: "/fast", "PATH": "p"}
    assert mpi_folders.without_outer(outer) == {}
    assert mpi_folders.without_outer(users) == users


def test_a_rank_started_by_mpirun_uses_its_users_folder(bases: tuple[Path, Path]) -> None:
    made = mpi_folders.settings_of_rank({})
    assert set(made.values()) == {str(private_folders.candidates([str(bases[1])])[0])}
    assert stat.S_IMODE(Path(made[MEMORY]).stat().st_mode) == 0o700
    Path(made[MEMORY]).chmod(0o777)
    assert mpi_folders.settings_of_rank({})[MEMORY] == str(private_folders.candidates([str(bases[1])])[1])
    assert mpi_folders.settings_of_rank({MEMORY: "/fast"}) == {}


def test_memory_stays_private_if_all_names_are_taken(bases: tuple[Path, Path]) -> None:
    """Regression: another user's eight folders made ranks of a plain mpirun use files with predictable names."""
    for taken in private_folders.candidates([str(bases[1])]):
        taken.mkdir(mode=0o777)
        taken.chmod(0o777)
    made = mpi_folders.settings_of_rank({}, [str(bases[0])])
    assert set(made.values()) == {str(private_folders.candidates([str(bases[0])])[0])}
