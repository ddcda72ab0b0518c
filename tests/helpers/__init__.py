"""Everyday helpers, model helpers and roles: cases that every world runs.

A case is ``async def case_NAME(world)`` in one of the ``cases_`` modules: it asserts for itself, on every rank, against
numpy or plain Python computed from all ranks' known inputs, and is right for any number of ranks.
"""
