"""Defines the version of asyncdist."""

from typing import Final

__version__: Final = "0.1.0"
