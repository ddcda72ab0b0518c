"""Models, trees and values as flat memory or bytes. Nothing here sends. A torch that is too old is refused."""

import torch

from asyncdist import validation

_problem = validation.torch_problem(torch.__version__)
if _problem is not None:
    raise ImportError(_problem, name="torch")
