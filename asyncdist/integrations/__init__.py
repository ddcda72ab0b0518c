"""Averaging in programs that use Lightning, transformers, Accelerate, torchgfn or plain PyTorch.

Except for torchgfn, each module has a ``SelectiveAveraging``, which needs one or two lines in a program. It joins the
job, or trains alone if no launcher has started one. It needs no coroutines, because it uses :mod:`asyncdist.blocking`,
and starts no thread. The extra with a module's name installs the library that the module imports
(``pip install 'asyncdist[lightning]'``).
"""
