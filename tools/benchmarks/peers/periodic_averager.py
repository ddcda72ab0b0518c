"""torch's PeriodicModelAverager on gloo: the mean of a model's parameters."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from work import MEAN, check_mean, median_s, write

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(MEAN.tensor(1.0 + dist.get_rank()))
parameter.grad = torch.zeros_like(parameter)  # the averager skips parameters without a gradient
averager = PeriodicModelAverager(period=1, warmup_steps=0)
mean_s = median_s(MEAN, lambda: averager.average_parameters([parameter]))
check_mean(parameter.detach())
if dist.get_rank() == 0:
    write(mean_s=mean_s)
dist.destroy_process_group()
