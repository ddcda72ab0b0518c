"""The public names of asyncdist, each with the module that it is imported from on its first use."""

from . import blocking as blocking, errors as errors, simulation as simulation
from ._version import __version__ as __version__
from .collectives.groups import Group as Group
from .errors import (
    AsyncdistError as AsyncdistError,
    BusyError as BusyError,
    ClosedError as ClosedError,
    DeadlockError as DeadlockError,
    DisagreementError as DisagreementError,
    LateError as LateError,
    LocalProtocolError as LocalProtocolError,
    RankLostError as RankLostError,
    RemoteError as RemoteError,
    RemoteProtocolError as RemoteProtocolError,
    StallError as StallError,
    StartTimeoutError as StartTimeoutError,
    TimeLimitError as TimeLimitError,
    TransportError as TransportError,
    TruncationError as TruncationError,
)
from .functional.averaging import (
    average_gradients as average_gradients,
    average_models as average_models,
)
from .functional.calls import Calls as Calls
from .functional.checkpoints.population_checkpoint import (
    PendingSave as PendingSave,
    async_save_population as async_save_population,
    save_population as save_population,
)
from .functional.checkpoints.population_loading import (
    LoadedPopulation as LoadedPopulation,
    load_population as load_population,
)
from .functional.collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    barrier as barrier,
    broadcast as broadcast,
    gather as gather,
    new_group as new_group,
    surviving_group as surviving_group,
)
from .functional.load_balance import (
    report_load_imbalance as report_load_imbalance,
    report_time_info as report_time_info,
)
from .functional.main_process import (
    compute_and_broadcast as compute_and_broadcast,
    gather_from_all_ranks as gather_from_all_ranks,
    gather_scalar_from_all_ranks as gather_scalar_from_all_ranks,
    is_distributed as is_distributed,
    is_main_process as is_main_process,
    reduce_and_broadcast as reduce_and_broadcast,
    zero_first as zero_first,
    zero_only as zero_only,
)
from .functional.parallel_groups import (
    ParallelGroups as ParallelGroups,
    ParallelLayout as ParallelLayout,
    new_parallel_groups as new_parallel_groups,
    parallel_groups as parallel_groups,
)
from .functional.ragged_gather import gather_distributed_data as gather_distributed_data
from .functional.rank_layout import (
    DistributedContext as DistributedContext,
    DistributedContextmpi4py as DistributedContextmpi4py,
    RankLayout as RankLayout,
    initialize_distributed_compute as initialize_distributed_compute,
    initialize_distributed_compute_mpi4py as initialize_distributed_compute_mpi4py,
)
from .functional.seeding import seed_all as seed_all
from .functional.soups.best_of_population import best_of_population as best_of_population
from .functional.soups.choosing import Soup as Soup
from .functional.soups.moving import ema as ema
from .functional.soups.saved import (
    greedy_soup as greedy_soup,
    lawa as lawa,
    uniform_soup as uniform_soup,
)
from .launch.config import MultiprocessConfig as MultiprocessConfig
from .launch.process_groups import (
    default_backend as default_backend,
    get_distributed_backend as get_distributed_backend,
    init_dist as init_dist,
    init_parallel_groups as init_parallel_groups,
    init_process_group_from_backend as init_process_group_from_backend,
    set_distributed_backend as set_distributed_backend,
)
from .launch.rank_process import init_and_run as init_and_run
from .launch.spawn import launch_subprocesses as launch_subprocesses
from .messaging.channels import (
    Channel as Channel,
    ChannelStatistics as ChannelStatistics,
    Envelope as Envelope,
)
from .messaging.user_requests.progress import (
    Progress as Progress,
    progress as progress,
)
from .runtime.run import (
    open_world as open_world,
    run as run,
    run_local as run_local,
)
from .runtime.world import (
    World as World,
    WorldStatistics as WorldStatistics,
    current_world as current_world,
)
from .simulation.exploration.explore import explore as explore
from .simulation.faults import (
    Corrupt as Corrupt,
    Delay as Delay,
    Interrupt as Interrupt,
    Join as Join,
    Kill as Kill,
    Partition as Partition,
    Restart as Restart,
    SlowLink as SlowLink,
    SlowRank as SlowRank,
    Stall as Stall,
)
from .simulation.links import Link as Link, Network as Network
from .simulation.report import SimReport as SimReport
from .simulation.simulate import simulate as simulate
from .spmd.gradient_update import (
    agent_gradient_update as agent_gradient_update,
    gradient_update as gradient_update,
)
from .spmd.mesh import (
    DP_AXIS_NAME as DP_AXIS_NAME,
    POP_AXIS_NAME as POP_AXIS_NAME,
    Mesh as Mesh,
    new_mesh as new_mesh,
)
from .spmd.sharding import (
    Sharding as Sharding,
    get_global_ranks as get_global_ranks,
    get_process_id as get_process_id,
    is_dist_initialized as is_dist_initialized,
    shmap_map as shmap_map,
    shmap_vmap as shmap_vmap,
    split_key_to_devices as split_key_to_devices,
    tree_device_put as tree_device_put,
)
from .spmd.tree_collectives import (
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    psum as psum,
)
