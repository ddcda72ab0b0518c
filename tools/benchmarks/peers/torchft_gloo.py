"""torchft's ProcessGroupGloo, which can be configured again after a failure: the mean by all_reduce."""

from __future__ import annotations

import os

from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions
from torchft import ProcessGroupGloo
from work import MEAN, check_mean, median_s, write

rank = int(os.environ["RANK"])
group = ProcessGroupGloo()
store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/torchft"
group.configure(store, replica_id=f"replica{rank}", rank=rank, world_size=2)
values = MEAN.tensor(1.0 + rank)
options = AllreduceOptions()
options.reduceOp = ReduceOp.SUM


def mean() -> None:
    group.allreduce([values], options).wait()
    values.div_(2)


mean_s = median_s(MEAN, mean)
check_mean(values)
if rank == 0:
    write(mean_s=mean_s)
group.shutdown()
