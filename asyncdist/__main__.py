"""``python -m asyncdist``: the same as the ``asyncdist`` command."""

from asyncdist.cli import main

if __name__ == "__main__":
    main()
