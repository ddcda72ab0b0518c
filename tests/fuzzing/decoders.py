"""Passes damaged bytes to all other code that reads another process's output.

Each :class:`Decoder` has valid examples, and lists the exceptions that it may raise. Every other exception is a fault.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tempfile
import time
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from asyncdist.collectives.agreement.messages import AgreementKey
from asyncdist.collectives.error_exchange import Call, LocalResult, _pack_header, _read_header
from asyncdist.collectives.groups import Group
from asyncdist.collectives.one_sided import OutdatedError, _SharedWindow
from asyncdist.errors import DisagreementError, RemoteProtocolError, TransportError
from asyncdist.functional.checkpoints import manifests
from asyncdist.messaging import wire
from asyncdist.tensors import pytrees, serialization
from asyncdist.tensors.flat_state import Fingerprint
from asyncdist.transports.torch_distributed.meeting.rendezvous import _Gathering
from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
from asyncdist.trust.job_secret import JobSecret
from fuzzing.mutations import mutate
from protocols.replay_buffer.messages import Declare, declare, declared
from protocols.replay_buffer.store import RowLayout

_DAMAGED_COUNT: Final = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """A reader of bytes from outside the process.

    Attributes:
        name: Name of the reader.
        read: Function that reads the bytes.
        raises: Exceptions that it may raise.
        examples: Valid inputs.
        share: Relative frequency of calls.
    """

    name: str
    read: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    examples: tuple[bytes, ...]
    share: int = 8


class DecoderFailure(AssertionError):
    """A decoder has raised an exception that it must not raise.

    Attributes:
        decoder: Name of the decoder.
        data: Bytes that the decoder has received.
    """

    def __init__(self, decoder: str, data: bytes, error: BaseException) -> None:
        super().__init__(f"{decoder}: {error!r:.300} on {data.hex()[:4000]}")
        self.decoder = decoder
        self.data = data


# -- what they read ---------------------------------------------------------------------------------------------------


def _values() -> Iterator[Any]:
    yield from (None, True, 2**70, -1, 0.5, 1 + 2j, "text", "\ud800", b"bytes", bytearray(b"x"), {1, "a"}, frozenset())
    yield {"a": [1, (2, 3.5)], (1, 2): {"nested": [[], {}]}}
    yield {"weights": torch.arange(6.0).reshape(2, 3), "mask": torch.tensor([True]), "none": torch.empty(0, 4)}
    yield [np.arange(4, dtype="<i2").reshape(2, 2), np.float32(1.5), np.zeros((0, 3))]


def _read_key(data: bytes) -> object:
    key = AgreementKey.parse(data.decode(errors="replace"))
    key.check(4)
    return key.members(), key.text


def _read_layout(data: bytes) -> object:
    layout = declared(_DECLARE(data))
    return layout.nbytes, layout.difference(layout)


def _read_result_header(data: bytes) -> object:
    padded = data[:1024].ljust(1024, b"\0")
    header = _read_header(1, torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    if header.has_error:
        header.remote_error()
    return str(header.call), header.later_nbytes


def _read_lines(data: bytes) -> object:
    lines = pytrees.lines_from_text(data.decode(errors="replace"))
    mine = (("tree", "a dict"),)
    return lines == mine or pytrees.first_difference([mine, lines], [0, 1])


def _read_manifest(data: bytes) -> object:
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as folder:
        (Path(folder) / "manifest.json").write_bytes(data)
        _, manifest = manifests.find_newest(Path(folder))
    return [manifests.plan(manifest["files"], size) for size in (1, 2, 3)]


def _read_window(data: bytes) -> object:
    memories = [torch.zeros(_SharedWindow.window_nbytes(8), dtype=torch.uint8) for _ in range(2)]
    head = torch.frombuffer(bytearray(data[: len(memories[1])] or b"\0"), dtype=torch.uint8)
    memories[1][: len(head)] = head
    services: Any = types.SimpleNamespace(rank=0, gone=set(), read_nbytes=0)
    exposed = _SharedWindow(services, Group((0, 1), 0, 7100, None), memories, 8)
    record = _run(exposed.published_by(1))
    if record is not None:
        target = memoryview(bytearray(8))
        with contextlib.suppress(OutdatedError):
            _run(exposed.read(1, record, [target], lambda _: None, deadline=0.0))
    return record


def _run(coroutine: Any) -> Any:
    """Run a coroutine that waits for nothing except its next turn on the loop."""
    try:
        for _ in range(3):
            coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine still waits")


def _read_store(data: bytes) -> object:
    """Meet at a store in which another process has written: ``data`` replaces each value that is read, in turn."""
    for place in range(5):
        store = SealedStore(HashStore(), JobSecret(b"of this job"))
        leads = place < 3
        gathering = _Gathering(store, 0 if leads else 1, 2, time.monotonic())
        inside = store.part("asyncdist")
        world = inside.part(gathering._hello)
        value = data.decode(errors="replace")
        match place:
            case 0:
                inside.set("hello/1", value)
            case 1:
                inside.set("unanswered", value)
            case 2:
                world.set("rank 1", value)
            case 3:
                inside.set(f"answer/{gathering._hello}", "world")
                inside.part("world").set("missing", "")
                inside.part("world").set("facts", value)
            case _:
                inside.set(f"answer/{gathering._hello}", "world")
                inside.part("world").set("facts", gathering._facts)
                inside.part("world").set("missing", value)
        with contextlib.suppress(TransportError, DisagreementError):
            gathering.wait_for_all()
    return None


def _manifests() -> tuple[bytes, ...]:
    entry = {"nbytes": 1000, "crc32": 5, "metric": 0.5, "metric_mode": "min"}
    facts = {
        "format": manifests._FORMAT,
        "version": manifests._VERSION,
        "asyncdist": "0",
        "files": [entry, {**entry, "metric": None}],
    }
    return (json.dumps(facts).encode(), json.dumps(facts, indent=1).encode())


def _window_heads() -> tuple[bytes, ...]:
    heads = []
    for version in (1, 2, 2**62):
        head = bytearray(_SharedWindow.window_nbytes(0))
        head[:8] = struct.pack("<Q", version)
        record = struct.pack("<Qqd", version, 10, float("nan"))
        head[64 : 64 + 28] = record + struct.pack("<I", zlib.crc32(record))
        heads.append(bytes(head))
    return tuple(heads)


def _layouts() -> tuple[bytes, ...]:
    batches = (torch.zeros(2, 3), {"a": torch.zeros(1), "b": torch.zeros(1, 2, dtype=torch.int8)}, (torch.ones(4, 0),))
    codec = wire.Codec(Declare)
    return tuple(codec.encode(declare(RowLayout.of(batch)))[1] for batch in batches)


_DECLARE: Final = wire.Codec(Declare).decoders[0]


def decoders() -> tuple[Decoder, ...]:
    """Return all decoders."""
    model = (((("a.weight",), (3, 4), "float32")), (("b", "c"), (), "int64"))
    calls = (
        LocalResult(payload=b"x" * 20),
        LocalResult(),
        LocalResult(error=ValueError("wrong")),
        LocalResult(payload=b"y" * 5000),
    )
    return (
        Decoder(
            "serialization",
            serialization.decode,
            (RemoteProtocolError,),
            tuple(map(serialization.encode, _values())),
            40,
        ),
        Decoder(
            "agreement key",
            _read_key,
            (RemoteProtocolError,),
            (b"barrier on ranks 0-3", b"x on ranks 0,2, time 7, their turn"),
            20,
        ),
        Decoder(
            "fingerprint",
            lambda data: Fingerprint.from_text(data.decode(errors="replace")),
            (ValueError,),
            (Fingerprint(model).to_text().encode(),),
            20,
        ),
        Decoder("replay layout", _read_layout, (ValueError, RecursionError, msgspec.MsgspecError), _layouts(), 20),
        Decoder("tree", _read_lines, (ValueError,), (b'[["tree","a dict"],["tree[0]","a leaf"]]',), 20),
        Decoder(
            "result header",
            _read_result_header,
            (RemoteProtocolError,),
            tuple(_pack_header(call, Call("barrier", 0)) for call in calls),
            20,
        ),
        Decoder("window", _read_window, (), _window_heads(), 10),
        Decoder("manifest", _read_manifest, (ValueError,), _manifests(), 3),
        Decoder("store", _read_store, (), (b"2", b"3 0123456789abcdef", b"0 1"), 1),
    )


def check(decoder: Decoder, data: bytes) -> bool:
    """Read the data once; return whether it is accepted. Raises DecoderFailure."""
    try:
        decoder.read(data)
    except decoder.raises:
        return False
    except Exception as error:
        raise DecoderFailure(decoder.name, data, error) from error
    return True


def fuzz(
    seed: int, count: int, *, on_failure: Callable[[DecoderFailure], object] | None = None
) -> dict[str, list[int]]:
    """Pass about ``count`` damaged inputs to the decoders; return how many each has read, and how many it accepted.

    Raises:
        DecoderFailure: A decoder raised a forbidden exception and ``on_failure`` does not handle it.
    """
    rng = random.Random(f"{seed} decoders")
    everything = decoders()
    whole = sum(decoder.share for decoder in everything)
    found = {}
    for decoder in everything:
        found[decoder.name] = counts = [0, 0]
        damaged: list[bytes] = []
        for example in decoder.examples:
            assert check(decoder, example), f"{decoder.name} refuses a valid example: {example!r}"
        for _ in range(max(1, count * decoder.share // whole)):
            data = rng.choice(damaged) if damaged and rng.random() < 0.4 else rng.choice(decoder.examples)
            data = mutate(data, rng.getrandbits(48), rng.choice(decoder.examples))
            if rng.random() < 0.1 and len(data) < 4096:
                damaged.append(data)
                del damaged[:-_DAMAGED_COUNT]
            counts[0] += 1
            try:
                counts[1] += check(decoder, data)
            except DecoderFailure as failure:
                if on_failure is None:
                    raise
                on_failure(failure)
    return found
