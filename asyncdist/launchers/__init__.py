"""Reads the variables with which launchers describe their ranks; part of the ground."""
