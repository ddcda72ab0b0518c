"""torch.distributed on gloo: blocking send, recv and all_reduce."""

from __future__ import annotations

import torch
from torch import distributed as dist
from work import LARGE, MEAN, SMALL, check_mean, median_s, write

dist.init_process_group("gloo")
rank = dist.get_rank()


def pass_on(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    if rank:
        dist.recv(incoming, 0)
        dist.send(outgoing, 0)
    else:
        dist.send(outgoing, 1)
        dist.recv(incoming, 1)


def mean() -> None:
    dist.all_reduce(values)
    values.div_(2)


small_s = median_s(SMALL, lambda: pass_on(SMALL.tensor(), SMALL.tensor()))
tensor, back = LARGE.tensor(), LARGE.tensor()
large_s = median_s(LARGE, lambda: pass_on(tensor, back))
values = MEAN.tensor(1.0 + rank)
mean_s = median_s(MEAN, mean)
check_mean(values)
if rank == 0:
    write(small_s=small_s, large_s=large_s, mean_s=mean_s)
dist.destroy_process_group()
