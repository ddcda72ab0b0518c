"""Implements policies without a coordinator and metrics; each is a rule: a set of pure functions in one file."""
