"""Encodes the Python values that ranks exchange as bytes, preserving their exact types.

Pickle is not used, because unpickling can execute arbitrary code. Values are written as msgpack. Types that msgpack
lacks, such as tuples and tensors, become a map whose only key is an integer that identifies the type. Instances of
subclasses raise an error, because they would be decoded as their base type. Decoding checks all data, and allocates
memory only in proportion to the size of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch

from asyncdist.errors import RemoteProtocolError
from asyncdist.tensors.byte_views import byte_view, dtype_name, oddity_of, to_host

ALLOWED: Final = (
    "None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, dense torch.Tensor, "
    "numpy arrays and scalars of numbers (exactly these types, not subclasses)"
)
DEPTH_MAX: Final = 100
#: Maximum size of an exception's message, in bytes.
_TEXT_NBYTES_MAX: Final = 800
#: Maximum size of an exception's class name, in bytes.
_KIND_NBYTES_MAX: Final = 150

_BIG_INT, _TEXT, _COMPLEX, _BYTEARRAY, _TUPLE, _DICT, _SET, _FROZENSET, _TENSOR, _ARRAY, _SCALAR = range(11)
_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 64) - 1
_NUMPY_KINDS: Final = "biufc"
_DTYPES: Final = {
    dtype_name(value): value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not name.startswith("q")  # quantised tensors also need scale and zero point
}

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode

#: Position of a nested value: its container's position, and its index or key there. None for the outermost value.
_Where: TypeAlias = "tuple[_Where, Any] | None"


def encode(value: Any) -> bytes:
    """Encode a value as bytes.

    Args:
        value: Value that consists of the types in :data:`ALLOWED`, nested at most 100 levels deep. A tuple or set
            counts as two levels. Tensors may be on any device. Their device and autograd graph are not encoded.

    Raises:
        TypeError: The value is or contains an object of a different type.
        ValueError: The value is nested too deeply or contains itself, or a part is larger than 4 GiB.
    """
    tree = _pack(value, None, 0)
    try:
        return _encode(tree)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a value of type {type(value).__name__} cannot be sent: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    """Decode the bytes that :func:`encode` returned. Tensors are on the CPU and share no memory with ``data``.

    Raises:
        RemoteProtocolError: The bytes are not an encoded value.
    """
    try:
        return _unpack(_decode(data))
    except Exception as error:  # torch and numpy raise many kinds of errors for malformed data
        raise RemoteProtocolError(f"{len(data)} received bytes are not an encoded value: {error}") from error


def type_name(kind: type) -> str:
    """Return a class's name, preceded by its module unless the module is ``builtins``."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype named ``name``, such as ``"float32"``. Raise KeyError if the name is unknown."""
    return _DTYPES[name]


def name_and_message(error: BaseException) -> tuple[str, str]:
    """Return an exception's class name and message, cut to less than a thousand bytes in total."""
    try:
        text = str(error)
    except Exception as second:  # An exception here would lose the report that other ranks await.
        text = f"(its __str__ raised {type(second).__name__})"
    return cut_text(type_name(type(error)), _KIND_NBYTES_MAX), cut_text(text, _TEXT_NBYTES_MAX)


def cut_text(text: str, nbytes_max: int) -> str:
    """Return a string cut to at most ``nbytes_max`` bytes in UTF-8, with lone surrogates escaped."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= nbytes_max:
        return data.decode()
    return f"{data[: nbytes_max - 30].decode(errors='ignore')}... ({len(text)} characters)"


# -- writing ----------------------------------------------------------------------------------------------------------


def _pack(value: Any, where: _Where, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else {_BIG_INT: _int_to_bytes(value)}
    if kind is str:
        return value if _is_unicode(value) else {_TEXT: value.encode("utf-8", "surrogatepass")}
    if depth >= DEPTH_MAX:  # a tuple or a set adds two levels
        raise ValueError(f"a value must be nested at most {DEPTH_MAX} levels deep and must not contain itself")
    if kind is list:
        return _pack_items(value, where, depth)
    pack = _PACK.get(kind)
    if pack is not None:
        return pack(value, where, depth + 1)
    if isinstance(value, np.generic) and kind is value.dtype.type and value.dtype.kind in _NUMPY_KINDS:
        return {_SCALAR: [value.dtype.str, value.tobytes()]}
    raise _unsupported(f"a value of type {type_name(kind)}", where)


def _pack_items(items: Any, where: _Where, depth: int) -> list[Any]:
    return [_pack(item, (where, index), depth + 1) for index, item in enumerate(items)]


def _pack_dict(value: dict[Any, Any], where: _Where, depth: int) -> Any:
    flat = []
    for key, item in value.items():
        flat += [_pack(key, (where, key), depth), _pack(item, (where, key), depth)]
    return {_DICT: flat}


def _pack_tensor(tensor: torch.Tensor, where: _Where, depth: int) -> Any:
    del depth
    oddity = oddity_of(tensor)
    if oddity is not None:
        raise _unsupported(oddity, where)
    return {_TENSOR: [dtype_name(tensor.dtype), list(tensor.shape), bytes(byte_view(to_host(tensor)))]}


def _pack_array(array: np.ndarray[Any, Any], where: _Where, depth: int) -> Any:
    del depth
    if array.dtype.kind not in _NUMPY_KINDS:
        raise _unsupported(f"a numpy array of dtype {array.dtype}", where)
    return {_ARRAY: [array.dtype.str, list(array.shape), array.tobytes()]}


_PACK: Final[dict[type, Callable[[Any, _Where, int], Any]]] = {
    complex: lambda value, where, depth: {_COMPLEX: [value.real, value.imag]},
    bytearray: lambda value, where, depth: {_BYTEARRAY: bytes(value)},
    tuple: lambda value, where, depth: {_TUPLE: _pack_items(value, where, depth)},
    dict: _pack_dict,
    # The order of a set of strings differs between processes. Sorting makes the encoded bytes equal.
    set: lambda value, where, depth: {_SET: sorted(_pack_items(value, where, depth), key=repr)},
    frozenset: lambda value, where, depth: {_FROZENSET: sorted(_pack_items(value, where, depth), key=repr)},
    torch.Tensor: _pack_tensor,
    np.ndarray: _pack_array,
}


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _is_unicode(text: str) -> bool:
    """Return whether a string can be encoded in UTF-8. A string with lone surrogates, as in some file names, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unsupported(what: str, where: _Where) -> TypeError:
    steps = []
    while where is not None:
        where, step = where
        steps.append(f"[{step!r:.60}]")
    place = f" at {''.join(reversed(steps))}" if steps else ""
    return TypeError(f"{what}{place} cannot be sent; the types that can be sent are {ALLOWED}")


# -- reading ----------------------------------------------------------------------------------------------------------


def _unpack(node: Any) -> Any:
    if type(node) is list:
        return [_unpack(item) for item in node]
    if type(node) is not dict:
        return node
    ((kind, content),) = node.items()
    return _UNPACK[kind](content)


def _unpack_dict(flat: list[Any]) -> dict[Any, Any]:
    parts = [_unpack(part) for part in flat]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@torch.inference_mode(False)  # the tensor is used after the caller's inference mode has ended
def _unpack_tensor(content: list[Any]) -> torch.Tensor:
    name, shape, data = content
    dtype = _DTYPES[name]
    _check_size(shape, dtype.itemsize, _bytes(data))
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _unpack_array(content: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = content
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"a numpy array or scalar must have a numeric dtype, got {name!r}")
    _check_size(shape, dtype.itemsize, _bytes(data))
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _unpack_scalar(content: list[Any]) -> Any:
    name, data = content
    return _unpack_array([name, [], data])[()]


def _bytes(content: Any) -> bytes:
    if type(content) is not bytes:  # for a malicious integer n, bytearray(n) would allocate n bytes
        raise TypeError(f"the content must be bytes, got a {type(content).__name__}")
    return content


def _check_size(shape: list[int], itemsize: int, data: bytes) -> None:
    """Raise ValueError if the shape does not match the number of bytes. Must be called before allocating memory."""
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not match shape {shape} with {itemsize} bytes per element")


_UNPACK: Final[dict[int, Callable[[Any], Any]]] = {
    _BIG_INT: lambda content: int.from_bytes(_bytes(content), "little", signed=True),
    _TEXT: lambda content: content.decode("utf-8", "surrogatepass"),
    _COMPLEX: lambda content: complex(*content),
    _BYTEARRAY: lambda content: bytearray(_bytes(content)),
    _TUPLE: lambda content: tuple(_unpack(item) for item in content),
    _DICT: _unpack_dict,
    _SET: lambda content: {_unpack(item) for item in content},
    _FROZENSET: lambda content: frozenset(_unpack(item) for item in content),
    _TENSOR: _unpack_tensor,
    _ARRAY: _unpack_array,
    _SCALAR: _unpack_scalar,
}
