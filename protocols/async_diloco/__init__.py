"""Asynchronous DiLoCo: one rank applies each contribution as it arrives, and no rank waits for another."""
