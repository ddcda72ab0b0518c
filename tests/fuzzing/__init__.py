"""Passes damaged frames, damaged strings and false messages to all code that reads other processes' output."""
