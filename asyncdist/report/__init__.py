"""Converts recordings to pages, traces and tables, and answers SQL queries on them."""
