"""Computes numbers of steps and grace periods from the ranks' measured speeds."""
