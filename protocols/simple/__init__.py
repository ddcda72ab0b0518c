"""Implements policies without a coordinator or metrics. Each is a rule: a set of pure functions in one file."""
