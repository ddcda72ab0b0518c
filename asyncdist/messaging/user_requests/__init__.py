"""Awaits requests of the user's program: mpi4py's requests, works of torch.distributed and device events."""
