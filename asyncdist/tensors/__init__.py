"""Converts models, pytrees and Python values to flat tensors or bytes. Raises ImportError if torch is too old."""

import torch

from asyncdist import validation

_problem = validation.torch_problem(torch.__version__)
if _problem is not None:
    raise ImportError(_problem, name="torch")
