"""One set of bodies, run on every transport.

``cases_*.py`` hold them: ``async def case_...(end)``, executed by every rank with its own :class:`Endpoint`.
``test_conformance.py`` runs them in process and under mpirun; ``program.py`` is what mpirun starts.
"""
