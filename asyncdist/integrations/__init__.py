"""Averaging in programs that use Lightning, transformers, Accelerate, torchgfn or plain PyTorch.

Except for torchgfn, each module has a class ``SelectiveAveraging``, which needs one or two lines in a program. It joins
the job, or trains alone if no launcher has started one. It uses :mod:`asyncdist.blocking`, so it needs no coroutines
and starts no thread. The library that a module imports is installed with the extra of the module's name (``pip install
'asyncdist[lightning]'``).
"""
