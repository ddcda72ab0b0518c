"""Lets the members of a policy notice losses, elect leaders, and admit restarted ranks; used by several policies."""
