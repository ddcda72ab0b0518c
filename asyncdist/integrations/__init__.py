"""Averaging in programs that use Lightning, transformers, Accelerate, torchgfn or plain PyTorch.

Except for torchgfn, each module has a ``SelectiveAveraging``, which needs one or two lines in a program. It joins the
job, or trains alone if no launcher has started one. It starts no thread and needs no coroutines, because it uses
:mod:`asyncdist.blocking`. Each module imports the library after which it is named, and which the extra of the same name
installs (``pip install 'asyncdist[lightning]'``).
"""
