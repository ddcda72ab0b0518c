"""The life of one rank, from its start to its end."""
