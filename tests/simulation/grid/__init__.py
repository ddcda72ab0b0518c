"""Tries all pairs of features in the simulator, with oracles that hold for every combination."""
