"""Starts ranks on other hosts, by ssh."""
