"""hivemind: one step of its DecentralizedAverager in a group of two, with its matchmaking."""

from __future__ import annotations

import sys

import hivemind
import torch
from work import MEAN, check_mean, median_s, start_second, write

is_second = len(sys.argv) > 2
dht = hivemind.DHT(initial_peers=sys.argv[2:], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
values = MEAN.tensor(2.0 if is_second else 1.0)
averager = hivemind.DecentralizedAverager(
    [values], dht, prefix="mean", target_group_size=2, min_group_size=2, min_matchmaking_time=0.2, start=True
)
second = None
if not is_second:
    addresses = [str(address) for address in dht.get_visible_maddrs()]
    second = start_second(*addresses)
mean_s = median_s(MEAN, lambda: averager.step(timeout=20))
with averager.get_tensors() as tensors, torch.no_grad():
    check_mean(tensors[0])
if second is not None:
    second.wait(30)
    write(mean_s=mean_s)
averager.shutdown()
dht.shutdown()
