"""Configures :func:`asyncdist.launch_subprocesses`: number of ranks, rendezvous, and parallel groups."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import torch

from asyncdist import validation
from asyncdist.functional.parallel_groups import ParallelLayout
from asyncdist.launch import process_groups
from asyncdist.launchers import addresses

LAUNCH_METHODS: Final = ("forkserver", "spawn")


@dataclass(frozen=True, slots=True)
class MultiprocessConfig:
    """Describes a job: its number of ranks, their rendezvous, and their division into parallel groups.

    :meth:`resolve` fills in fields that are None.

    Attributes:
        rank: Rank of this process in the job. :func:`launch_subprocesses` sets it in each child.
        local_rank: Rank of this process on its host. :func:`launch_subprocesses` sets it in each child.
        world_size: Number of ranks in the job.
        local_world_size: Number of ranks on this host.
        master_addr: Name or address of rank 0's host.
        master_port: Free TCP port on rank 0's host.
        init_method: Rendezvous for process groups: ``"env://"`` for ``master_addr`` and ``master_port``,
            ``"tcp://address:port"``, or ``"file://path"``.
        model_parallelism: Number of ranks that share one stage of a model.
        pipeline_parallelism: Number of stages of a model. Its product with ``model_parallelism`` must divide
            ``world_size``.
        backend: Name of the default process group's backend, as registered with torch; None for
            :func:`asyncdist.get_distributed_backend`.
        model_parallel_backend, pipeline_parallel_backend, data_parallel_backend: Backends of the parallel groups; None
            for the default group's backend.
        launch_method: ``"forkserver"`` or ``"spawn"``.

    Raises:
        TypeError: A number is not an int.
        ValueError: A value is not allowed, or two values contradict each other. The message names the allowed values.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "forkserver"

    def __post_init__(self) -> None:
        self._check_places()
        if self.world_size is not None:
            ParallelLayout(self.world_size, self.model_parallelism, self.pipeline_parallelism)
        self._check_meeting()
        for name, backend in self._backends().items():
            if backend is not None:
                process_groups.check_backend(backend, name)
        if self.launch_method not in LAUNCH_METHODS:
            why = " (threads and MPI do not survive a fork)" if self.launch_method == "fork" else ""
            allowed = validation.one_of(LAUNCH_METHODS)
            raise ValueError(f"launch_method must be {allowed}, got {self.launch_method!r}{why}")

    def _check_places(self) -> None:
        for name in ("world_size", "local_world_size"):
            if getattr(self, name) is not None:
                validation.count(name, getattr(self, name))
        for name in ("model_parallelism", "pipeline_parallelism"):
            validation.count(name, getattr(self, name))
        if self.world_size is not None and (self.local_world_size or 0) > self.world_size:
            raise ValueError(f"local_world_size must be <= world_size={self.world_size}, got {self.local_world_size}")
        for name, size_name in (("rank", "world_size"), ("local_rank", "local_world_size")):
            value, size = getattr(self, name), getattr(self, size_name)
            if value is not None and (type(value) is not int or not 0 <= value < (size or value + 1)):
                allowed = "an integer >= 0" if size is None else f"from 0 to {size - 1} with {size_name}={size}"
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
        if self.rank is not None and (self.local_rank or 0) > self.rank:
            raise ValueError(f"local_rank must be <= rank={self.rank}, got {self.local_rank}")

    def _check_meeting(self) -> None:
        address = self.master_addr
        if type(address) is not str or not address or any(character.isspace() for character in address):
            raise ValueError(f"master_addr must be the name or address of rank 0's host, got {address!r}")
        if self.master_port is not None:
            process_groups.check_port("master_port", self.master_port)
        process_groups.check_init_method(self.init_method)

    def _backends(self) -> dict[str, str | None]:
        names = ("backend", "model_parallel_backend", "pipeline_parallel_backend", "data_parallel_backend")
        return {name: getattr(self, name) for name in names}

    def resolve(self) -> MultiprocessConfig:
        """Return a copy in which missing fields are filled in if they can be determined before the ranks start.

        - ``local_world_size``: ``world_size`` if given, otherwise the number of GPUs, or 1 without a GPU.
        - ``master_port``: a free port of this host, unless ``rank`` is given, because other ranks would choose other
          ports.
        - ``rank`` and ``local_rank``: 0 if there is one rank. Otherwise, ``local_rank`` is derived from ``rank``.

        Raises:
            ValueError: The new values contradict the given ones, or ``master_addr`` cannot be resolved. Or
                ``master_port`` is missing although the job is on several hosts or ``rank`` is given.
        """
        local_size = self.local_world_size or self.world_size or max(1, torch.cuda.device_count())
        size = self.world_size or local_size
        if self.master_port is None and size > local_size and self.init_method == "env://":
            raise ValueError(
                f"master_port must be set, because only {local_size} of the {size} ranks are on this host; pass the "
                "same port on all hosts"
            )
        if self.master_port is None and size > 1 and self.rank is not None and self.init_method == "env://":
            raise ValueError("master_port must be set to the same port on all ranks if rank is set, got None")
        if size > 1 and self.init_method == "env://":
            addresses.check_address("master_addr", self.master_addr)
        rank = 0 if size == 1 else self.rank
        return dataclasses.replace(
            self,
            rank=rank,
            local_rank=rank % local_size if self.local_rank is None and rank is not None else self.local_rank,
            world_size=size,
            local_world_size=local_size,
            master_port=self.master_port or addresses.find_free_port(),
        )
