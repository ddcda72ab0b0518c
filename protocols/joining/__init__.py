"""Lets the members of a policy detect losses, elect leaders, and admit restarted ranks. Used by several policies."""
