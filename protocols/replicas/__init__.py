"""Selective averaging among replicas of several ranks each, as under DDP or `fully_shard`."""
