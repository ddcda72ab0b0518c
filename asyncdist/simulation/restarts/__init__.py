"""Connects ranks that are started again after their death to the others."""
