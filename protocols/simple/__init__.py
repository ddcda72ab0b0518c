"""Implements policies without a coordinator or metrics. Each is defined by a rule: pure functions in one file."""
