"""What several test modules share. ``tests/conftest.py`` puts this package on the path."""
