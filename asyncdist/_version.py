"""The one place that names the version."""

from typing import Final

__version__: Final = "0.1.0"
