"""Tests that compiled and interpreted modules give the same results, and which modules an installation compiles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import torchrun
from support.compiled_copy import TOP, copied, pretend_to_compile

from asyncdist import compiled

#: Frames, errors and the outcomes of damaged frames, as text, to compare compiled with interpreted modules.
ACCOUNT = """
import json, random, sys
from dataclasses import dataclass
from asyncdist.messaging import mailboxes, wire
from asyncdist.errors import LocalProtocolError
from asyncdist.transports.persistent_send import PersistentSend

@dataclass(frozen=True)
class Message:
    number: int
    value: float
    text: str

@dataclass(frozen=True)
class Other:
    pass

rng = random.Random(7)
codec = wire.Codec(Message)
lines = []

def refusal(call, *args):
    try:
        return repr(call(*args))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def opened(frame):
    reader = wire.FrameReader(bytearray(frame) + bytes(-len(frame) % 8))
    reader.open(len(frame))
    return [reader.key, reader.stamp, reader.round, reader.sequence, reader.route(), codec.decoders[0](reader.payload)]

class Sent:
    def __init__(self):
        self.frames = []
        self.transport, self.size = self, 4
    def shared(self, make, *args):
        return make(*args)
    def start_send(self, frame, dest, tag):
        self.frames.append(bytes(frame))
    def prepare_send(self, nbytes, dest, tag):
        room = bytearray(-(-nbytes // 8) * 8)
        return PersistentSend(Prepared(self, memoryview(room)[:nbytes]), room, None, dest)

class Unprepared(Sent):
    def prepare_send(self, nbytes, dest, tag):
        return None

class Prepared:
    def __init__(self, sent, frame):
        self.sent = sent
        self.frame = frame
    def Start(self):
        self.sent.start_send(self.frame, 0, 0)
    def Test(self):
        return True

route = wire.pack_route(0, nonce=2**32 - 1, epoch=3, scope=2**32 - 2)
for _ in range(300):
    message = Message(rng.randrange(-(2**63), 2**64), rng.uniform(-1e9, 1e9), "x" * rng.randrange(200))
    dest, round, sequence = rng.randrange(4), rng.choice([0, 1, 2**32 - 1]), rng.choice([0, 2**40])
    sent, unprepared = Sent(), Unprepared()
    for engine in (sent, unprepared):
        outbox = mailboxes.Outbox(
            codec, [route], engine, tag=5, name="x", sequence=sequence, contacts=set(), flow=None,
        )
        outbox.post(message, dest, round)
        outbox.post(message, dest, round)
    frame, later = sent.frames
    assert unprepared.frames == [frame, later]
    assert frame != later  # by its sequence
    damaged = bytearray(frame)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    cut = frame[: rng.randrange(len(frame))]
    lines += [frame.hex(), refusal(opened, frame), refusal(opened, bytes(damaged)), refusal(opened, cut)]
    lines.append(refusal(opened, rng.randbytes(rng.randrange(100))))

options = {"tag": 5, "name": "x", "sequence": 0, "contacts": set(), "flow": None}
post = mailboxes.Outbox(codec, [route], Unprepared(), **options).post
good = Message(1, 0.5, "")
for args in [
    (good, 4, 0), (good, -1, 0), (good, True, 0), (good, 1.0, 0), (good, 2**70, 0), (good, 0, -1), (good, 0, 2**32),
    (good, 0, 2**70), (Other(), 0, 0), (Message("1", 0.5, ""), 0, 0), (Message(2**64, 0.5, ""), 0, 0),
    (Message(1, 0.5, "x" * 70000), 0, 0), (Message(1, 0.5, "\\ud800"), 0, 0), (None, 0, 0),
]:
    lines.append(refusal(post, *args))
print(json.dumps([wire.__file__, lines]))
"""


#: Simulations with every kind of fault, to compare their digests, the faults that fired, the counts, and the error of
#: endless turns.
SIMULATIONS = """
import asyncio, json, torch
import asyncdist as ad
from asyncdist.simulation import Compute, Corrupt, Delay, Exponential, Kill, Link, LogNormal, Network, Partition
from asyncdist.simulation import SlowLink, SlowRank, Stall, Uniform, simulate
from asyncdist.simulation import rank_turns
from asyncdist.errors import AsyncdistError

async def main(world, rounds):
    total = ""
    try:
        for number in range(rounds):
            await world.safe_point()
            if number % 5 == 0:
                async with asyncio.timeout(0.5):
                    total += str(await ad.all_gather(torch.tensor([world.rank + number])))
            elif number % 7 == 0:
                await world.sleep(0.001)
    except (AsyncdistError, TimeoutError) as error:
        return f"{number} {total} {type(error).__name__}"
    return total

# Each fault happens on every seed: the quickest run computes nothing and takes 3 ms, and each rank sends 13 messages or
# more. Rank 2's first frame to rank 0 says that it leaves; its last words, the second one, say so too.
PLANS = (
    [],
    [Kill(1, at_s=0.002)],
    [Kill(2, at_turn=60)],
    [Kill(0, at_message=10)],
    [Delay(0, 1, 5, 0.01), Stall(2, 0.0, 0.2), SlowRank(1, 0.0, 3.0)],
    [Partition((1,), 0.001, 0.05), SlowLink(0, 2, 0.0, 50.0), Corrupt(2, 0, 1, 30)],
)
LINKS = (Link(), Link(latency_s=Exponential(1e-4), bandwidth_nbytes_per_s=10**6), Link(latency_s=1e-5))

def told(seed):
    eager_nbytes = (None, 0, 100)[seed // 3 % 3]
    network = Network(link=LINKS[seed % 3], eager_nbytes=eager_nbytes, ranks_per_host=(None, 2)[seed % 2])
    compute = Compute(step_s=(LogNormal(1e-3), Uniform(0, 1e-3), 0.0)[seed // 2 % 3])
    faults = PLANS[seed // 6]
    try:
        report = simulate(main, 21, ranks=4, seed=seed, network=network, compute=compute, faults=faults, until_s=20.0)
    except AsyncdistError as error:
        return [f"{type(error).__name__}: {error}", []]
    counts = [report.message_count, report.byte_count, report.event_count, report.virtual_time_s]
    results = [str(result) for result in report.results]
    return [report.trace_digest, report.faults_fired, *counts, *results, str(report.trace[-1])]

async def forever(world):
    while True:
        await asyncio.sleep(0)

rank_turns.TURN_COUNT_MAX = 1000
lines = [told(seed) for seed in range(36)]
try:
    simulate(forever, ranks=2)
except AsyncdistError as error:
    lines.append(["endless", str(error)])
print(json.dumps([rank_turns.__file__, lines]))
"""


def account(script: str, *, pure: bool) -> tuple[str, list[Any]]:
    """Return the origin of a module, and the output of the script."""
    environ = {**os.environ, compiled.PURE_VARIABLE: "1" if pure else "", "PYTHONPATH": str(TOP)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    origin, lines = json.loads(done.stdout)
    return origin, lines


def test_compiled_and_interpreted_modules_behave_alike() -> None:
    if compiled.reason_against() is not None and shutil.which("gcc") is None:
        pytest.skip("no compiler here")
    compiled_from, compiled_lines = account(ACCOUNT, pure=False)
    source, lines = account(ACCOUNT, pure=True)
    assert Path(source).name == "wire.py"
    assert Path(compiled_from).name.startswith("wire.cpython"), compiled.describe()
    assert len(lines) > 1500
    assert compiled_lines == lines
    assert sum("CRC mismatch" in line for line in lines) >= 300
    assert sum("shorter than a header" in line for line in lines) >= 20


def test_compiled_and_interpreted_simulations_are_equal() -> None:
    if compiled.reason_against() is not None and shutil.which("gcc") is None:
        pytest.skip("no compiler here")
    compiled_from, compiled_lines = account(SIMULATIONS, pure=False)
    source, lines = account(SIMULATIONS, pure=True)
    assert Path(source).name == "rank_turns.py"
    assert Path(compiled_from).name.startswith("rank_turns.cpython"), compiled.describe()
    assert compiled_lines == lines
    assert len(lines) == len({line[0] for line in lines}) == 37
    for plan in range(1, 6):
        for line in lines[6 * plan : 6 * plan + 6]:
            assert line[1] and all(line[1]), f"plan {plan} did not take effect: {line}"
    assert "RankLostError" in str(lines)
    assert " 1001 turns " in lines[-1][1]


#: Each rank catches an error of torch, which takes a backtrace of the C++ stack, after each blocking call.
CATCHES_ERRORS_OF_TORCH = """
import torch
import asyncdist as ad

def train(world):
    for _ in range(5):
        try:
            torch.zeros(2)[5]
        except IndexError:
            world.sleep(0.001)

ad.simulate(ad.blocking.hosted(train), ranks=2, seed=1, strict=True)
"""


@pytest.mark.skipif(compiled.reason_against() is not None, reason="compiled code ends the backtraces")
def test_an_error_of_torch_does_not_end_the_process(tmp_path: Path) -> None:
    """Regression: the backtrace continued beyond the stack's bottom, in other stacks' memory, which caused SIGSEGV."""
    script = tmp_path / "catches.py"
    script.write_text(CATCHES_ERRORS_OF_TORCH)
    torchrun.run_alone(script).check()


#: Modules that use no other compiled module. An installation treats all modules in the same way, and Cython would take
#: 5 s for all of them.
FEW_MODULES = ("messaging._crc32", "messaging.flow_control")


def checkout(folder: Path) -> ModuleType:
    """Return asyncdist/compiled.py in a copy of the files from which an installation is made."""
    copy = copied(folder / "asyncdist", FEW_MODULES)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "asyncdist/_version.py"):
        shutil.copy(TOP / name, folder / name)
    return copy


def build_without_compiler(folder: Path, *options: str) -> None:
    build = [sys.executable, "setup.py", "-q", "build_ext", *options]
    environment = {**os.environ, "CC": "false", compiled.PURE_VARIABLE: ""}
    ended = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "Cython failed" not in ended.stderr


def test_an_installation_does_without_a_compiler(tmp_path: Path) -> None:
    copy = checkout(tmp_path)
    earlier = copy.folder().with_name(f"{copy.folder().name[:-8]}00000000")
    earlier.mkdir(parents=True)
    build_without_compiler(tmp_path, "--inplace")
    assert copy.is_settled(), "an unsettled copy makes tools/setup compile again each time"
    assert "install gcc" in copy.describe()
    assert not earlier.exists()


@pytest.mark.long
def test_compiling_that_was_interrupted_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: tools/setup mistook the empty folders for folders of a failed attempt, and did nothing."""
    monkeypatch.setenv(compiled.PURE_VARIABLE, "")
    copy = checkout(tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nkill -KILL $(cat builder)\n")
    compiler.chmod(0o755)
    builder = (
        "import os, runpy; open('builder', 'w').write(str(os.getpid())); "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", builder, "-q", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CC": str(compiler)},
        capture_output=True,
        timeout=100,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert copy.folder().is_dir(), "the interrupt arrived before the folder existed"
    asked = [sys.executable, "-I", str(tmp_path / "asyncdist" / "compiled.py")]
    assert subprocess.run(asked, timeout=100).returncode == 1
    assert "tools/setup" in copy.describe()
    monkeypatch.setenv(compiled.PURE_VARIABLE, "1")
    assert subprocess.run(asked, timeout=100).returncode == 0, "each set-up would compile again without success"


@pytest.mark.long
def test_building_a_wheel_leaves_the_editable_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ``pip install .`` left an empty folder, so the modules ran interpreted from then on."""
    monkeypatch.delenv(compiled.PURE_VARIABLE, raising=False)
    copy = checkout(tmp_path)
    pretend_to_compile(copy)
    build_without_compiler(tmp_path)
    assert copy.describe() == "yes"
