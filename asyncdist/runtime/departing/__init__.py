"""Brings what a rank says last to all ranks of a large world: that it leaves, has come to its end, or has failed."""
