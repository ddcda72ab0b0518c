"""Averages where people train: in Lightning, transformers, Accelerate, torchgfn and plain PyTorch.

Each module has a ``SelectiveAveraging`` that joins a job, or trains alone where no launcher started one, and needs one
line in a program, or two. Nothing here starts a thread, and nobody has to write a coroutine: see
:mod:`asyncdist.blocking`. The modules import the library that they are named after; an extra of the same name installs
it (``pip install 'asyncdist[lightning]'``).
"""
