"""Turns recordings into what people and other programs read: pages, traces, tables, answers to queries."""
