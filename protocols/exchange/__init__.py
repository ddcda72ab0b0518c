"""Averages members' contributions in numbered rounds, in the background, for policies without metrics."""
