"""Cases for helper functions and roles, which run in every world.

A case is ``async def case_NAME(world)`` in one of the ``cases_`` modules. It makes its assertions on every rank,
compares with numpy or plain Python computed from all ranks' known inputs, and works with any number of ranks.
"""
