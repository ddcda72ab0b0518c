"""Code shared by several test modules; ``tests/conftest.py`` makes this package importable."""
