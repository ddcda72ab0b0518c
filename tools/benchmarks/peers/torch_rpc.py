"""torch.distributed.rpc: a call on the other process, which returns its argument."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import rpc
from work import LARGE, SMALL, median_s, write


def echo(value: Any) -> Any:
    return value


rank = int(os.environ["RANK"])
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
if rank == 0:
    message, tensor = bytes(SMALL.nbytes), LARGE.tensor()
    small_s = median_s(SMALL, lambda: rpc.rpc_async("rank1", echo, (message,)).wait())
    large_s = median_s(LARGE, lambda: rpc.rpc_async("rank1", echo, (tensor,)).wait())
    write(small_s=small_s, large_s=large_s)
rpc.shutdown()
