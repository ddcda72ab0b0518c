"""Selective averaging of models that are each trained by several ranks, as under DDP or `fully_shard`."""
