"""Test cases that run unchanged on every transport.

The modules ``cases_*.py`` contain the cases. Every rank executes ``async def case_...(end)`` with its own
:class:`Endpoint`. ``test_conformance.py`` runs the cases in one process, and ``test_launched.py`` runs ``program.py``
under launchers.
"""
