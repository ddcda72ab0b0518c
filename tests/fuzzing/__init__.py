"""Passes damaged frames, damaged texts and false messages to all code that reads other processes' output."""
