"""Creates torch.distributed process groups for plain functions, which run their own collectives.

Coroutines do not need process groups, because their world uses the torch transport. All functions in this module block,
like those of torch.distributed.
"""

from __future__ import annotations

import datetime
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncdist import environment, validation
from asyncdist.errors import LocalProtocolError, TransportError
from asyncdist.functional.parallel_groups import ParallelGroups, ParallelLayout, current_groups
from asyncdist.launchers import addresses
from asyncdist.transports.torch_distributed.meeting import stores
from asyncdist.transports.torch_distributed.meeting.rendezvous import await_listener

#: Backends that torch has registered but that cannot communicate.
_FAKE_BACKENDS = ("undefined", "fake")


# -- backends ---------------------------------------------------------------------------------------------------------


def default_backend() -> str:
    """Return ``"nccl"`` if torch sees a GPU and was built with NCCL, otherwise ``"gloo"``."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "nccl"
    return "gloo"


def get_distributed_backend() -> dist.Backend:
    """Return the backend for new process groups: the user's choice or, without one, :func:`default_backend`.

    Raises:
        ValueError: The chosen backend is not available.
    """
    return dist.Backend(check_backend(environment.backend_name() or default_backend()))


def set_distributed_backend(backend: str) -> None:
    """Set the backend for new process groups, in this process and in processes that it starts.

    Args:
        backend: Name of a backend that torch has registered, or ``"device:backend,..."``.

    Raises:
        ValueError: torch has no backend of this name, or was built without it.
    """
    environment.set_backend_name(check_backend(backend))


def available_backends() -> list[str]:
    """Return the available backends, including those that extensions have registered."""
    names = [name for name in dist.Backend.backend_list if name not in _FAKE_BACKENDS]
    return [name for name in names if dist.is_backend_available(name)]


def check_backend(backend: object, name: str = "backend") -> str:
    """Return a backend's name in lower case, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``, or raise ValueError."""
    available = available_backends()
    if isinstance(backend, str) and backend:
        parts = [part.rpartition(":") for part in backend.lower().split(",")]
        if all(part[2] in available and (part[0] or len(parts) == 1) for part in parts):
            return backend.lower()
    raise ValueError(
        f"{name} must be {validation.one_of(available)} with torch {torch.__version__}, or one of them for each type "
        f"of device as in 'cpu:gloo,cuda:nccl', got {backend!r}"
    )


# -- starting ---------------------------------------------------------------------------------------------------------


def init_process_group_from_backend(
    backend: str | dist.Backend | None = None,
    *,
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Create torch.distributed's default process group. Blocks until all ranks have joined.

    Args:
        backend: Backend of the group; None for :func:`get_distributed_backend`.
        init_method: Rendezvous: ``"env://"``, ``"tcp://address:port"`` or ``"file://path"``.
        rank: Rank of this process; None for the value of the environment variable RANK.
        world_size: Number of ranks; None for the value of the environment variable WORLD_SIZE.
        timeout_s: Timeout of the rendezvous and of every collective, in seconds; None for torch's default.

    Raises:
        ValueError: The backend is not available.
        RuntimeError: A default process group already exists, or the ranks cannot connect.
    """
    chosen = get_distributed_backend() if backend is None else check_backend(str(backend))
    dist.init_process_group(
        chosen,
        init_method=init_method,
        rank=-1 if rank is None else rank,
        world_size=-1 if world_size is None else world_size,
        timeout=None if timeout_s is None else datetime.timedelta(seconds=timeout_s),
    )


def init_dist(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    init_method: str = "env://",
    backend: str | dist.Backend | None = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """Make this process a torch.distributed rank: set its environment variables, GPU and default process group.

    Args:
        rank: Rank of this process in the job.
        local_rank: Rank of this process on its host. It selects the GPU, modulo the number of GPUs.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        master_addr: Name or address of rank 0's host.
        master_port: Free TCP port on rank 0's host.
        init_method: Rendezvous: ``"env://"``, ``"tcp://address:port"`` or ``"file://path"``.
        backend: Backend of the group; None for :func:`get_distributed_backend`.
        timeout_s: Timeout of the rendezvous at an address and port, in seconds; None for torch's default of 1800 s.
            Collectives always use torch's default.

    Raises:
        ValueError: A number is out of range, the backend is not available, or ``init_method`` is not allowed.
        TransportError: The ranks did not connect in time. The message names the rendezvous.
        RuntimeError: A default process group already exists.
    """
    check_init_method(init_method)
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be > 0 seconds, got {timeout_s!r}")
    check_place(rank, local_rank, world_size, local_world_size, master_port)
    if dist.is_initialized():
        raise RuntimeError(
            "init_dist() must be called once, but torch.distributed already has a default process group; call "
            "destroy_process_group() first"
        )
    environment.set_variables(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    chosen = get_distributed_backend() if backend is None else check_backend(str(backend))
    url = urllib.parse.urlsplit(init_method)
    place = (master_addr, master_port) if init_method == "env://" else (url.hostname, url.port)
    store = _join_store(init_method, place, rank, world_size, timeout_s)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size)


def _join_store(
    init_method: str, place: tuple[str | None, int | None], rank: int, world_size: int, timeout_s: float | None
) -> Any:
    """Join the store within ``timeout_s`` seconds, wait until all ranks have joined it, and return it."""
    usual = dist.constants.default_pg_timeout
    limit_s = usual.total_seconds() if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    address, port = place
    try:
        if rank != 0 and address is not None and port is not None:
            await_listener(address, port, deadline)
        left = datetime.timedelta(seconds=max(0.001, deadline - time.monotonic()))
        store = stores.answered(lambda: _meet(init_method, place, rank, world_size, left), left.total_seconds())
    except (OSError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        where = init_method if address is None else f"{address}:{port}"
        raise TransportError(
            f"rank {rank} did not reach the other {world_size - 1} ranks at {where} within {limit_s:g} s: {first}"
        ) from error
    store.set_timeout(usual)
    return PrefixStore("default_pg", store)  # separates torch's keys from those of the store's other users


def _meet(
    init_method: str, place: tuple[str | None, int | None], rank: int, world_size: int, timeout: datetime.timedelta
) -> Any:
    """Return the store when all ranks have joined it. If it has an address, rank 0's store listens only there."""
    address, port = place
    if rank == 0 and address is not None and port is not None:
        listener = addresses.listen_at(address, port)  # None under torchrun, whose agent serves the store
        if listener is not None:
            descriptor = listener.detach()
            return TCPStore(address, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=descriptor)
    store, _, _ = next(iter(dist.rendezvous(init_method, rank, world_size, timeout=timeout)))  # type: ignore[attr-defined]
    return store


def end_dist() -> None:
    """Destroy all process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_place(rank: int, local_rank: int, world_size: int, local_world_size: int, master_port: int) -> None:
    """Raise TypeError or ValueError if a rank, size or port is out of range."""
    validation.count("world_size", world_size)
    validation.count("local_world_size", local_world_size)
    if local_world_size > world_size:
        raise ValueError(f"local_world_size must be <= world_size={world_size}, got {local_world_size}")
    for name, value, size in (("rank", rank, world_size), ("local_rank", local_rank, local_world_size)):
        if type(value) is not int or not 0 <= value < size:
            raise ValueError(f"{name} must be from 0 to {size - 1}, got {value!r}")
    check_port("master_port", master_port)


def check_init_method(value: object) -> None:
    """Raise TypeError or ValueError if ``value`` is not an allowed rendezvous for process groups."""
    allowed = "'env://', 'tcp://address:port' or 'file://path'"
    if not isinstance(value, str):
        raise TypeError(f"init_method must be {allowed}, got {value!r}")
    url = urllib.parse.urlsplit(value)
    try:
        is_allowed = {
            "env": value == "env://",
            "tcp": bool(url.hostname and url.port),
            "file": bool(url.path.strip("/")),
        }.get(url.scheme, False)
    except ValueError:  # the URL's port is not a number
        is_allowed = False
    if not is_allowed:
        raise ValueError(f"init_method must be {allowed}, got {value!r}")


def check_port(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a TCP port."""
    if type(value) is not int or not 0 < value < 65536:
        raise ValueError(f"{name} must be a port from 1 to 65535, got {value!r}")


def init_parallel_groups(
    model_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    *,
    model_backend: str | None = None,
    pipeline_backend: str | None = None,
    data_backend: str | None = None,
) -> ParallelGroups[dist.ProcessGroup]:
    """Create the model, pipeline and data parallel process groups. All ranks must call this function.

    :mod:`asyncdist.functional.parallel_groups` describes the division into groups.

    Args:
        model_parallelism: Number of ranks that share one stage of a model.
        pipeline_parallelism: Number of stages of a model. Its product with ``model_parallelism`` must divide the
            world's size.
        model_backend, pipeline_backend, data_backend: Backends of the groups; None for the default group's backend.

    Returns:
        This rank's groups. From now on, :func:`asyncdist.parallel_groups` also returns them.

    Raises:
        ValueError: The numbers do not divide the world, or a backend is not available.
        LocalProtocolError: There is no default process group.
    """
    _check_initialized()
    backends = [
        None if backend is None else check_backend(backend, name)
        for name, backend in (
            ("model_backend", model_backend),
            ("pipeline_backend", pipeline_backend),
            ("data_backend", data_backend),
        )
    ]
    layout = ParallelLayout(dist.get_world_size(), model_parallelism, pipeline_parallelism)
    model, pipeline, data = (
        _new_subgroup(ranks, backend)
        for ranks, backend in zip(
            (layout.model_groups(), layout.pipeline_groups(), layout.data_groups()), backends, strict=True
        )
    )
    groups = ParallelGroups(layout, model, pipeline, data)
    current_groups.set(groups)
    return groups


def _new_subgroup(ranks: Sequence[Sequence[int]], backend: str | None) -> dist.ProcessGroup:
    mine: dist.ProcessGroup | None
    mine, _ = dist.new_subgroups_by_enumeration(ranks, backend=backend)  # type: ignore[no-untyped-call]
    assert mine is not None, "every rank is in one group of each kind"
    return mine


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise LocalProtocolError(
            "torch.distributed has no process group in this process; call asyncdist.init_dist(...) first"
        )


# -- all to all -------------------------------------------------------------------------------------------------------


def all_to_all(input: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Send the i-th part of ``input`` to member i, and return the received parts. Blocks; differentiable.

    :func:`asyncdist.all_to_all` is the awaitable version, over a group of a world.

    Args:
        input: Tensor of the same shape and dtype on all members, on a device that the group's backend supports. Its
            first dimension is split evenly among the members.
        group: Process group; None for the default group.

    Returns:
        A tensor like ``input``, whose i-th part was sent by member i. In the backward pass, gradients are sent back.

    Raises:
        ValueError: The first dimension cannot be split evenly.
        LocalProtocolError: There is no process group, or this rank is not a member.
    """
    _check_initialized()
    size = dist.get_world_size(group)
    if size < 1:
        raise LocalProtocolError(
            f"group must include this rank, {dist.get_rank()}; only members of a process group may call its collectives"
        )
    if not input.dim() or input.shape[0] % size:
        raise ValueError(
            f"the first dimension of input must be a multiple of the {size} ranks, got shape {tuple(input.shape)}"
        )
    result: torch.Tensor = _AllToAll.apply(input, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        dist.all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]
