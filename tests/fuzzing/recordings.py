"""Damages recordings, with correct checksums, and passes them to every command that reads recordings.

Each command must end with exit code 0, or with 2 and one printable line, and must write nothing outside its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import torch

import asyncdist as ad
from asyncdist.recording.reader import RecordingError, read_recording
from asyncdist.recording.writer import SUFFIX
from asyncdist.report import commands, page
from asyncdist.simulation.replay.replay import ReplayedJob, check_replayable
from asyncdist.story import command as story
from asyncdist.waits import WaitId, WaitKind
from fuzzing.mutations import mutate, odd_value
from protocols import AsyncSelectiveAveragingPolicy

_SIZE: Final = 3
#: Number of damaged recordings for which one page is drawn, since a figure takes tenths of a second.
_PAGE_EVERY: Final = 10
#: Names that are dangerous if they are obeyed by a terminal, a browser, a path, or the code of a test.
_NAMES: Final = (
    "j\x1b[2J\x1b]0;owned\x07",
    "<script>alert(1)</script>",
    "../../escaped",
    "/tmp/escaped",
    'a"""\nopen("PWNED", "w")\n"""',
    "a\nasyncdist: all is well",
    "\u202egnp.exe",
    "",
    " \n ",
    "x" * 70_000,
)
_NUMBERS: Final = (-1, -(2**63), 2**63, 2**64 - 1, 2**53, 10**9, 0, 1, True, 0.5, 1e300, float("nan"), float("inf"))


class CommandFailure(AssertionError):
    """A command did something other than work, or refuse the recording in one line."""


@dataclass(slots=True)
class RankFile:
    """The content of a rank's file, as separate parts.

    Attributes:
        header: Header of the file.
        events: Events, each a list of the index of its kind, the microseconds since the file's beginning, and the
            fields.
    """

    header: dict[str, Any]
    events: list[list[Any]]

    def write(self, folder: Path, changed: Callable[[bytes], bytes] = lambda content: content) -> None:
        """Write the file, in one block; ``changed`` damages its content before the checksum is made."""
        content = changed(b"".join(map(msgpack.packb, self.events)))
        block = msgpack.packb([100.0, zlib.crc32(content), content])
        name = f"{self.header.get('rank')!s:.10}".replace("/", "_")
        (folder / f"{name}{SUFFIX}").write_bytes(msgpack.packb(self.header) + block)


async def _train(world: ad.World) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, replacement_ratio=0.5) as policy:
        for _ in range(12):
            await policy.step(float(world.rank))


def recorded() -> list[RankFile]:
    """Return the files of a good recording, with one additional event of each kind."""
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as folder:
        ad.simulate(_train, ranks=_SIZE, seed=5, record=folder)
        files = [_taken_apart(path) for path in sorted(Path(folder).iterdir())]
    kinds = list(files[0].header["kinds"])
    more: dict[str, list[Any]] = {
        "abandoned": [0, 1, 5, "no donor is left"],
        "waited": [WaitId(WaitKind.MESSAGE, 40, name="words"), 0.5],
        "lost": [1, 0, 0],
        "returned": [1, 1],
        "failed": [0, 0],
        "interrupted": ["a message, in main"],
        "collective": [7000, 0, 0],
        "reduced": [7000, 4, "00ff00ff"],
        "measured": [WaitId(WaitKind.WRITTEN_NBYTES, None, 1, 2), 3],
        "cut": ["it is full"],
        "joined": [0, 1, 5, 2],
        "told": ["nothing moved\n  rank 1 waits"],
        "coordinator": [0, 1, 2],
        "deadline": [WaitId(WaitKind.MESSAGE, 40, name="words"), 0, 0],
        "contributed": [0, 1, 0, 5, 0, 1.0, 2.0, 10, 0, 0],
        "timer": [WaitId("kind_of_another_version", number=3), 0, 0, 0],
    }
    for file in files:
        at_us = file.events[-1][1]
        file.events[-1:-1] = [[kinds.index(kind), at_us, *fields] for kind, fields in more.items()]
    return files


def _taken_apart(path: Path) -> RankFile:
    header, *blocks = msgpack.Unpacker(io.BytesIO(path.read_bytes()), max_buffer_size=1 << 24)
    events = []
    for time_s, _, content in blocks:
        inner = msgpack.Unpacker(max_buffer_size=1 << 24)
        inner.feed(content)
        events += [[code, int((time_s - 100.0) * 1e6) + at_us, *fields] for code, at_us, *fields in inner]
    return RankFile(header, events)


def damage(files: list[RankFile], rng: random.Random, folder: Path) -> None:
    """Write a recording into the folder with one or several damages."""
    copies = [RankFile(dict(each.header), [list(event) for event in each.events]) for each in files]
    raw: Callable[[bytes], bytes] = lambda content: content  # noqa: E731
    for _ in range(rng.choice((1, 1, 2, 5))):
        of = rng.choice(copies)
        match rng.randrange(6):
            case 0:  # if all ranks have the same name, it is accepted
                name, value = rng.choice(list(of.header)), _hostile(rng)
                for each in copies if rng.random() < 0.7 else [of]:
                    each.header[name] = value
            case 1:
                of.header.pop(rng.choice(list(of.header)), None)
            case 2 | 3:
                event = rng.choice(of.events)
                event[rng.randrange(len(event))] = _hostile(rng)
            case 4:
                event = rng.choice(of.events)
                del event[rng.randrange(len(event)) :]
                event += [_hostile(rng) for _ in range(rng.randrange(4))]
            case _:
                bits = rng.getrandbits(48)
                raw = lambda content: mutate(content, bits, content)  # noqa: E731, B023
    for each in copies:
        each.write(folder, raw)


def _hostile(rng: random.Random) -> Any:
    match rng.randrange(4):
        case 0:
            return rng.choice(_NAMES)
        case 1:
            return rng.choice(_NUMBERS)
        case 2:
            return [rng.choice(_NUMBERS) for _ in range(rng.choice((0, 1, 2, 3)))]
        case _:
            return odd_value(rng)


def _check_replay(folder: Path) -> int:
    """Read a recording as a replay does, up to the point at which its script would begin."""
    recording = read_recording(folder)
    check_replayable(recording)
    ReplayedJob(recording, None)
    return 0


def _commands(folder: Path, *, with_page: bool) -> Iterator[tuple[str, Callable[[], int]]]:
    path = str(folder)
    calls: dict[str, Callable[[object], int]] = {
        "trace": lambda _: commands.run_trace(path, None, None, []),
        "export": lambda _: commands.run_export(path, None, None, "csv"),
        "parquet": lambda _: commands.run_export(path, None, None, "parquet"),
        "query": lambda _: commands.run_query(path, None, f"SELECT * FROM ranks, {_EVERYTHING}"),
    }
    if with_page:
        calls["report"] = lambda _: commands.run_report(path, None, None)
    for name, call in calls.items():
        yield name, functools.partial(commands.run, argparse.Namespace(command=name, call=call))
    yield "story", lambda: story.run(str(folder))


_EVERYTHING: Final = "(SELECT count(*) FROM applied, decided, told, over, measured)"


def check(folder: Path, seed: int) -> Counter[str]:
    """Run all commands on a recording and count the outcomes; raise CommandFailure for a fault."""
    fates: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as place, contextlib.chdir(place):
        for number, (name, command) in enumerate(_commands(folder, with_page=seed % _PAGE_EVERY == 0)):
            out = Path(place, str(number))
            out.mkdir()
            os.chdir(out)
            told, printed = io.StringIO(), io.StringIO()
            try:
                with contextlib.redirect_stderr(told), contextlib.redirect_stdout(printed):
                    code = command()
            except Exception as error:
                raise CommandFailure(f"seed {seed}: {name}: {error!r:.300}") from error
            lines = told.getvalue().splitlines()
            is_well = code == 0 and not lines
            is_refused = code == 2 and len(lines) == 1 and not any(out.iterdir())
            if not (is_well or is_refused) or not all(line.isprintable() for line in lines):
                raise CommandFailure(f"seed {seed}: {name}: exit code {code}, {lines!r:.1000}")
            if not all(line.isprintable() for line in printed.getvalue().replace("\t", " ").splitlines()):
                raise CommandFailure(f"seed {seed}: {name}: printed {printed.getvalue()!r:.1000}")
            fates[f"{name}: {'read' if is_well else 'refused'}"] += 1
        if {each.name for each in Path(place).iterdir()} != {str(each) for each in range(number + 1)}:
            raise CommandFailure(f"seed {seed}: written outside of the folder of a command")
    try:
        fates["replay: read"] += not _check_replay(folder)
    except RecordingError:
        fates["replay: refused"] += 1
    except Exception as error:
        raise CommandFailure(f"seed {seed}: replay: {error!r:.300}") from error
    return fates


def fuzz(seeds: range) -> Counter[str]:
    """Check a damaged recording for each seed; return the commands' outcomes. Raises CommandFailure."""
    files, fates = recorded(), Counter[str]()
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="fuzzed-") as folder:
            damage(files, random.Random(f"{seed} recordings"), Path(folder))
            fates += check(Path(folder), seed)
    return fates


def draw_one_page() -> int:
    """Return the length of the page of the undamaged recording: this checks that the examples are valid as a whole."""
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as folder:
        for each in recorded():
            each.write(Path(folder))
        return len(page.render(read_recording(folder)))
