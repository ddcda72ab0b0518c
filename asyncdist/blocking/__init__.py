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

from asyncdist import compiled as _compiled

__path__[:0] = _compiled.search_path("blocking")  # before any submodule is imported

from asyncdist.blocking.helpers import (
    Face as Face,
    blocking as _blocking,
    blocking_context as _blocking_context,
    context as context,
    with_wrapped_result as _with_wrapped_result,
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
from asyncdist.functional import (
    averaging as _averaging,
    collectives as _collectives,
    main_process as _main_process,
    parallel_groups as _parallel_groups,
    ragged_gather as _ragged_gather,
    rank_layout as _rank_layout,
)
from asyncdist.functional.checkpoints import (
    population_checkpoint as _population_checkpoint,
    population_loading as _population_loading,
)
from asyncdist.functional.soups import best_of_population as _best
from asyncdist.spmd import mesh as _mesh, tree_collectives as _tree_collectives

all_gather = _blocking(_collectives.all_gather)
all_reduce = _blocking(_collectives.all_reduce)
all_to_all = _blocking(_collectives.all_to_all)
async_save_population = _with_wrapped_result(_population_checkpoint.async_save_population)
average_gradients = _blocking(_averaging.average_gradients)
average_models = _blocking(_averaging.average_models)
barrier = _blocking(_collectives.barrier)
best_of_population = _blocking(_best.best_of_population)
broadcast = _blocking(_collectives.broadcast)
compute_and_broadcast = _blocking(_main_process.compute_and_broadcast)
gather = _blocking(_collectives.gather)
gather_distributed_data = _blocking(_ragged_gather.gather_distributed_data)
gather_from_all_ranks = _blocking(_main_process.gather_from_all_ranks)
gather_scalar_from_all_ranks = _blocking(_main_process.gather_scalar_from_all_ranks)
initialize_distributed_compute = _blocking(_rank_layout.initialize_distributed_compute)
initialize_distributed_compute_mpi4py = _blocking(_rank_layout.initialize_distributed_compute_mpi4py)
load_population = _blocking(_population_loading.load_population)
new_group = _blocking(_collectives.new_group)
new_mesh = _blocking(_mesh.new_mesh)
new_parallel_groups = _blocking(_parallel_groups.new_parallel_groups)
pmax = _blocking(_tree_collectives.pmax)
pmean = _blocking(_tree_collectives.pmean)
pmin = _blocking(_tree_collectives.pmin)
psum = _blocking(_tree_collectives.psum)
reduce_and_broadcast = _blocking(_main_process.reduce_and_broadcast)
save_population = _blocking(_population_checkpoint.save_population)
surviving_group = _blocking(_collectives.surviving_group)
zero_first = _blocking_context(_main_process.zero_first)
zero_only = _blocking_context(_main_process.zero_only)
