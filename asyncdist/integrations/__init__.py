"""Averaging in programs that use Lightning, transformers, Accelerate, torchgfn or plain PyTorch.

Except for torchgfn, each module has a ``SelectiveAveraging``, which takes one or two lines in a program. It joins the
job, or trains alone if no launcher started one. It starts no thread and needs no coroutines: see
:mod:`asyncdist.blocking`. Each module imports the library that it is named after; an extra of the same name installs it
(``pip install 'asyncdist[lightning]'``).
"""
