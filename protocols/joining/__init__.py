"""Lets members of a policy follow losses, elect leaders, and admit restarted ranks; used by several policies."""
