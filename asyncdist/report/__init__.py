"""Turns recordings into what other programs read: traces, tables, answers to queries."""
