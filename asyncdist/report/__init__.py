"""Converts recordings to pages, traces and tables, and answers queries on them."""
