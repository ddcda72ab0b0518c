"""Reads the environment variables with which launchers describe their ranks."""
