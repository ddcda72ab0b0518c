"""Tests that untrusted files of ``torch.save`` cannot fill the memory or take forever, and that all others are read."""

from __future__ import annotations

import itertools
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asyncdist.trust import torch_files


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + tuple_of(*arguments) + b"R"


def tensor(size: int, stride: int, numel: int = 1) -> bytes:
    storage = tuple_of(text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), number(numel)) + b"Q"
    layout = (number(0), tuple_of(number(size)), tuple_of(number(stride)), b"\x89", call("collections", "OrderedDict"))
    return call("torch._utils", "_rebuild_tensor_v2", storage, *layout)


def doubled(count: int, value: bytes) -> bytes:
    """Return a tuple of two equal tuples of two equal tuples, and so on."""
    for index in range(count):
        value += b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86"
    return value


def keys(*values: bytes) -> bytes:
    """Return a dictionary with these keys."""
    return b"}(" + b"".join(value + b"N" for value in values) + b"u"


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def colliding_pair(first: int) -> tuple[int, int]:
    """Return a tuple whose hash does not depend on ``first``. CPython's hash of tuples is xxHash with known primes."""
    word, primes = 1 << 64, (11400714785074694791, 14029467366897019727, 2870177450012600261)
    first_sum = (primes[2] + first * primes[1]) % word
    first_sum = ((first_sum << 31 | first_sum >> 33) * primes[0]) % word
    return first, (12345 - first_sum) * pow(primes[1], -1, word) % word


MODULUS = (1 << 61) - 1
PAIRS = [pair for pair in map(colliding_pair, range(2000)) if pair[1] < MODULUS][:101]
EQUAL_HASHES = {
    "integers": keys(*(b"\x8a\x0a" + (k * MODULUS).to_bytes(10, "little") for k in range(1, 103))),
    "pairs": keys(*(tuple_of(number(a), number(b)) for a, b in PAIRS)),
    "sizes": keys(*(tuple_of(call("torch", "Size", tuple_of(number(a), number(b)))) for a, b in PAIRS)),
    "complex numbers": keys(*(call("__builtin__", "complex", real(-1000003 * k), real(k)) for k in range(1, 103))),
}
_SIGNS = [tuple_of(*(number(-1 - (index >> bit & 1)) for bit in range(7))) for index in range(1 << 7)]
EQUAL_HASHES |= {
    "numbers -1 and -2": keys(*_SIGNS),
    "single keys": b"}" + b"".join(pair + b"Ns" for pair in _SIGNS),
    "single items of a set": call("__builtin__", "set", b"]" + b"".join(pair + b"a" for pair in _SIGNS)),
    "items of a set": call("__builtin__", "set", b"](" + b"".join(_SIGNS) + b"e"),
    "set by type": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("__builtin__", "set"),
        named("torch", "Tensor"),
        tuple_of(b"](" + b"".join(_SIGNS) + b"e"),
        b"}",
    ),
    "pairs in lists": call(
        "collections", "OrderedDict", b"](" + b"".join(b"](" + pair + b"Ne" for pair in _SIGNS) + b"e"
    ),
    "pairs in tuples": call("collections", "OrderedDict", b"](" + b"".join(pair + b"N\x86" for pair in _SIGNS) + b"e"),
    "storages": b"]("
    + b"".join(
        tuple_of(text("storage"), named("torch", "FloatStorage"), pair, text("cpu"), number(1)) + b"Q"
        for pair in _SIGNS
    )
    + b"e",
}
LATIN = call("_codecs", "encode", text("a"), text("latin1"))
HOSTILE = {
    "doubled bytes": call("_codecs", "encode", LATIN, text("hex")),
    "class of tensors": call("torch", "FloatTensor", number(1 << 20)),
    "class in the memo": tuple_of(
        named("torch", "FloatTensor") + b"q\x00", b"h\x00" + tuple_of(number(1 << 20)) + b"R"
    ),
    "new tensor": named("torch", "Tensor") + tuple_of(number(1 << 20)) + b"\x81",
    "parameter": call("torch.nn.parameter", "Parameter", call("torch", "FloatTensor", number(1 << 20))),
    "storage": call("torch.storage", "UntypedStorage", number(1 << 20)),
    "other dtype": call(
        "torch._utils", "_rebuild_device_tensor_from_cpu_tensor", tensor(9, 0), named("torch", "float64"), text("cpu")
    ),
    "called by type": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "FloatTensor"),
        named("torch", "Tensor"),
        tuple_of(number(1 << 20)),
        b"}",
    ),
    "set of a tensor": call("__builtin__", "set", tensor(9, 0)),
    "counter of a tensor": call("collections", "Counter", tensor(9, 0)),
    "doubled key": b"}" + doubled(60, number(1)) + number(1) + b"s",
    "doubled value": doubled(60, number(1)),
    "repeated bytes": tuple_of(text("a" * 1000) + b"q\x00", *[call("_codecs", "encode", b"h\x00", text("latin1"))] * 2),
    "repeated set": tuple_of(b"](" + b"K\x01" * 99 + b"eq\x00", *[call("__builtin__", "set", b"h\x00")] * 20),
    "repeated size": tuple_of(tuple_of(*[b"K\x01"] * 99) + b"q\x00", *[call("torch", "Size", b"h\x00")] * 20),
    "unknown function": b"N)R",
    "other instruction": b"\x95" + bytes(8) + number(1),
}


def write(path: Path, value: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + text("a") + value + b"s.")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(4))
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_small_pickle_of_a_large_object_is_refused(kind: str, tmp_path: Path) -> None:
    """Regression: files of 1 KB filled the memory, or were read forever."""
    write(tmp_path / "good.pt", tensor(1, 1))
    assert torch_files.load(tmp_path / "good.pt")["a"].tolist() == [0.0]
    write(tmp_path / "bad.pt", HOSTILE[kind])
    with pytest.raises(
        ValueError, match=r"it (calls|has a|has the instruction FRAME|has tuples that contain each other)"
    ):
        torch_files.load(tmp_path / "bad.pt")


@pytest.mark.parametrize("kind", EQUAL_HASHES)
def test_many_keys_with_equal_hashes_are_refused(kind: str, tmp_path: Path) -> None:
    """Regression: 260 KB of such keys took seconds, and 26 MB would have taken hours."""
    assert len(PAIRS) == 101 and len(set(map(hash, PAIRS))) == 1
    write(tmp_path / "bad.pt", EQUAL_HASHES[kind])
    with pytest.raises(ValueError, match="it has more than 100 numbers or tuples with equal hashes"):
        torch_files.load(tmp_path / "bad.pt")


def test_an_old_file_has_no_tensors_larger_than_itself(tmp_path: Path) -> None:
    """Regression: an old file that listed no storages had tensors of any size, with arbitrary content."""
    head = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {"little_endian": True}]
    parts = [pickle.dumps(each, 2) for each in head]
    value = tensor(1 << 20, 1, 1 << 20).replace(b"tQ", b"NtQ")
    (tmp_path / "old.pt").write_bytes(b"".join((*parts, b"\x80\x02" + value + b".", pickle.dumps([], 2))))
    with pytest.raises(ValueError, match="its tensors are larger than the file"):
        torch_files.load(tmp_path / "old.pt")


def test_lists_that_contain_each_other_are_refused(tmp_path: Path) -> None:
    """Regression: an optimizer would copy its state forever."""
    doubled_list: list[Any] = [1]
    for _ in range(60):
        doubled_list = [doubled_list, doubled_list]
    cycle: list[Any] = []
    cycle.append(cycle)
    for content in (doubled_list, cycle):
        torch.save({"a": content}, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match="lists or dictionaries that contain each other too often"):
            torch_files.load(tmp_path / "bad.pt")


@pytest.mark.filterwarnings("ignore::UserWarning")  # some kinds of tensors are deprecated
def test_all_other_objects_that_torch_loads_are_read(tmp_path: Path) -> None:
    marked = torch.ones(2)
    marked.note = "a"  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "b"  # type: ignore[attr-defined]
    shared = (0.9, 0.999)
    content: dict[str, Any] = {
        "tensors": [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)],
        "odd": [marked, parameter, nn.Parameter(torch.ones(1)), torch.ones(1).expand(9), torch.ones(9, device="meta")],
        "sparse": [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        "module": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
        "containers": [OrderedDict(a=1), Counter("aab"), {1, 2}, torch.Size((1, 2)), (), (1, (2, 3)), {(1, 2): 3}],
        "values": [
            None,
            True,
            1 << 70,
            1.5,
            1j,
            "é",
            b"abc",
            b"abd",
            torch.float16,
            torch.device("cpu"),
            torch.strided,
        ],
        "groups": [{"betas": shared, "params": [0]} for _ in range(1000)],
        "table": {(row, column / 8): row for row in range(30) for column in range(-9, 9)},
        "moves": [(column, 0) for _ in range(200) for column in (-1, -2)],  # these numbers have equal hashes
        "signs": [*itertools.product((-1, -2), repeat=7), *itertools.product((0.0, -0.0), repeat=7)],
        "repeated": [(1 << 70, (1, -1.0, None)) for _ in range(1000)],
        "large": [1 << power for power in range(200)],
    }
    for is_new in (False, True):
        if is_new:  # torch writes an old file of this dtype, but cannot load it
            content["uint16"] = torch.ones(2, dtype=torch.uint16)
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
        found = torch_files.load(tmp_path / "a.pt")
        assert found.keys() == content.keys()
        assert found["containers"] == content["containers"] and found["values"] == content["values"]
        assert found["signs"] == content["signs"]


@pytest.mark.slow  # DTensors take most of a second to import
def test_a_sharded_tensor_is_read(tmp_path: Path) -> None:
    """Regression: the function that makes tensors of other classes was refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        shard = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
        torch.save({"a": shard, "b": nn.Parameter(shard)}, tmp_path / "a.pt")
        found = torch_files.load(tmp_path / "a.pt")
        assert found["a"].to_local().tolist() == found["b"].to_local().tolist() == [1.0, 1.0]
    finally:
        torch.distributed.destroy_process_group()


def test_a_class_that_the_user_declares_as_safe_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.distributions.Normal(torch.zeros(1), torch.ones(1))}, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch_files.load(tmp_path / "a.pt")
    declared: list[Any] = [torch.distributions.Normal, torch.distributions.constraints.Constraint]
    with torch.serialization.safe_globals(declared):
        assert isinstance(torch_files.load(tmp_path / "a.pt")["a"], torch.distributions.Normal)
