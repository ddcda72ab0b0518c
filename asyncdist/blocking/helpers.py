"""Blocking versions of :mod:`asyncdist`'s helpers and collectives, with the same names and arguments."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

from asyncdist.blocking.callers import current_caller, entered
from asyncdist.functional import (
    averaging,
    collectives,
    main_process,
    parallel_groups,
    population_checkpoint,
    ragged_gather,
    rank_layout,
)
from asyncdist.functional.soups import best_of_population as best
from asyncdist.spmd import mesh, tree_collectives

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(fn: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Return a blocking version of a coroutine function."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return current_caller(fn.__name__).call(fn, *args, **kwargs)

    call.__doc__ = f"Call :func:`asyncdist.{fn.__name__}`, block until it completes, return its result.\n\n{fn.__doc__}"
    return call


def _blocking_context(
    fn: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Return a blocking version of a function that returns an asynchronous context manager."""

    @functools.wraps(fn)
    @contextmanager
    def enter(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with entered(fn(*args, **kwargs), current_caller(fn.__name__)) as given:
            yield given

    return enter


all_gather = _blocking(collectives.all_gather)
all_reduce = _blocking(collectives.all_reduce)
all_to_all = _blocking(collectives.all_to_all)
async_save_population = _blocking(population_checkpoint.async_save_population)
average_gradients = _blocking(averaging.average_gradients)
average_models = _blocking(averaging.average_models)
barrier = _blocking(collectives.barrier)
best_of_population = _blocking(best.best_of_population)
broadcast = _blocking(collectives.broadcast)
compute_and_broadcast = _blocking(main_process.compute_and_broadcast)
gather = _blocking(collectives.gather)
gather_distributed_data = _blocking(ragged_gather.gather_distributed_data)
gather_from_all_ranks = _blocking(main_process.gather_from_all_ranks)
gather_scalar_from_all_ranks = _blocking(main_process.gather_scalar_from_all_ranks)
initialize_distributed_compute = _blocking(rank_layout.initialize_distributed_compute)
initialize_distributed_compute_mpi4py = _blocking(rank_layout.initialize_distributed_compute_mpi4py)
load_population = _blocking(population_checkpoint.load_population)
new_group = _blocking(collectives.new_group)
new_mesh = _blocking(mesh.new_mesh)
new_parallel_groups = _blocking(parallel_groups.new_parallel_groups)
pmax = _blocking(tree_collectives.pmax)
pmean = _blocking(tree_collectives.pmean)
pmin = _blocking(tree_collectives.pmin)
psum = _blocking(tree_collectives.psum)
reduce_and_broadcast = _blocking(main_process.reduce_and_broadcast)
save_population = _blocking(population_checkpoint.save_population)
surviving_group = _blocking(collectives.surviving_group)
zero_first = _blocking_context(main_process.zero_first)
zero_only = _blocking_context(main_process.zero_only)
