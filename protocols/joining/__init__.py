"""Lets several policies detect lost members, choose leaders, and admit restarted ranks."""
