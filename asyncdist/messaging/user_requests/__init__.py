"""Awaits requests of the user's program: mpi4py requests, torch.distributed works and device events."""
