"""Blocking versions of asyncdist's functions and classes, for code without an event loop.

::

    with ad.blocking.open_world() as world:
        with ad.blocking.policy(AsyncSelectiveAveragingPolicy(model, optimizer, average_every=100)) as policy:
            for batch in loader:
                loss = train_step(model, optimizer, batch)
                policy.step(loss=loss)  # the only place where weights change

There is no background thread. The rank's event loop runs on the caller's thread while a call blocks, and is suspended
between calls.
"""

from asyncdist.blocking.faces import Face as Face, context as context
from asyncdist.blocking.helpers import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    async_save_population as async_save_population,
    average_gradients as average_gradients,
    average_models as average_models,
    barrier as barrier,
    best_of_population as best_of_population,
    broadcast as broadcast,
    compute_and_broadcast as compute_and_broadcast,
    gather as gather,
    gather_distributed_data as gather_distributed_data,
    gather_from_all_ranks as gather_from_all_ranks,
    gather_scalar_from_all_ranks as gather_scalar_from_all_ranks,
    initialize_distributed_compute as initialize_distributed_compute,
    initialize_distributed_compute_mpi4py as initialize_distributed_compute_mpi4py,
    load_population as load_population,
    new_group as new_group,
    new_mesh as new_mesh,
    new_parallel_groups as new_parallel_groups,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    psum as psum,
    reduce_and_broadcast as reduce_and_broadcast,
    save_population as save_population,
    surviving_group as surviving_group,
    zero_first as zero_first,
    zero_only as zero_only,
)
from asyncdist.blocking.policies import Policy as Policy, policy as policy
from asyncdist.blocking.process_world import end_process_world as end_process_world, process_world as process_world
from asyncdist.blocking.world import (
    World as World,
    current_world as current_world,
    hosted as hosted,
    open_world as open_world,
    run as run,
)
