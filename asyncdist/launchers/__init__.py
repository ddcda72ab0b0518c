"""Reads the environment variables by which launchers describe ranks."""
