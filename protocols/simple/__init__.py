"""Policies without a coordinator and without metrics, each of which is a rule: a set of pure functions in one file."""
