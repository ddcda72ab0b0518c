"""What a started rank does to its process before anything else: cores are shared, and garbage is sought less."""

from __future__ import annotations

import gc

import torch

from asyncdist import environment


def limit_threads() -> None:
    """Ranks that share a host share its cores: torch would give every one of them all."""
    threads = environment.threads_per_rank()
    if threads is not None:
        torch.set_num_threads(threads)


def spare_collections() -> None:
    """Have the garbage collector never look again at what was imported: some 170,000 objects of torch.

    They live as long as the process. Each full collection walked them, and so did the interpreter at its end, which is
    a quarter of what a rank that does nothing costs. Once in a process: what a user throws away between two runs is
    collected.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
