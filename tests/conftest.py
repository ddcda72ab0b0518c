"""Set-up for all tests: the path of their helpers, few threads, and which tests may start processes."""

from __future__ import annotations

import gc
import multiprocessing.util
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

pytest_plugins = ["pytester"]

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
pytest.register_assert_rewrite("support", "conformance", "helpers")
# A shell's background jobs ignore SIGINT, and jobs under nohup SIGHUP. Jobs that are started and signalled here would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# During the imports, a third of the time would go into collections that find no garbage; see pytest_collection_finish.
gc.disable()
# Several ranks and test processes share few cores.
torch.set_num_threads(1)

#: Tests in these folders get the mark ``launched``; only such tests may start processes.
LAUNCHED = (HERE / "launched", HERE / "conformance" / "test_launched.py")
#: The events of ``sys.audit`` with which Python announces that it starts a process.
STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=50, metavar="N", help="seeds of the scenario suite's quick test")


def pytest_itemcollected(item: pytest.Item) -> None:
    if any(item.path.is_relative_to(place) for place in LAUNCHED):
        item.add_marker("launched")
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


class _Guard:
    """Prevents tests without permission from starting processes; the error says where such a test belongs."""

    def __init__(self) -> None:
        self.is_refusing = False
        self._spawn = multiprocessing.util.spawnv_passfds
        # An audit hook sees every way to start a process, even through names that were imported earlier; but it is
        # permanent.
        sys.addaudithook(self._on_event)
        # The start methods "spawn" and "forkserver" raise no audit event; both call this function.
        multiprocessing.util.spawnv_passfds = self._on_spawn  # type: ignore[assignment]

    def _on_spawn(self, *args: Any) -> int:
        self.check("multiprocessing.Process.start")
        return self._spawn(*args)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        # Any test may be the first to import torch's compiler, which calls lscpu, or matplotlib, which lists the fonts.
        if self.is_refusing and event in STARTS and args[:1] not in (("lscpu",), ("fc-list",)):
            self.check(f"{event} {args[:2]}")

    def check(self, what: str) -> None:
        if self.is_refusing:
            raise RuntimeError(
                f"{what}: this test starts a process. Such tests belong to tests/launched, or have the mark 'workers' "
                "if the simulator's own processes are what they test"
            )


_GUARD = _Guard()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let only tests that are marked for it start processes, and see MPI.

    ``./tools/test --mpi mpich -m mpi`` must run all tests that differ there, so no other test may start ranks of MPI by
    accident. Without the mark ``mpi``, mpi4py is given the name of a library that does not exist, in this process and
    in its children.
    """
    may_start = item.get_closest_marker("launched") or item.get_closest_marker("workers")
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("mpi") is None:
            patch.setenv("MPI4PY_LIBMPI", "none for tests without @pytest.mark.mpi")
        _GUARD.is_refusing = may_start is None
        try:
            return (yield)
        finally:
            _GUARD.is_refusing = False


def pytest_collection_finish() -> None:
    """Exclude the imported objects from full garbage collections, because tests and the simulator collect often."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of a file, exclude the objects again that a policy under DDP or many simulated ranks have included."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
