"""Read by every Python process below a test with ``warm.environment``: lets ranks and simulations start warm."""

import os

if "ASYNCDIST_TEST_WARM" in os.environ:
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(__file__), os.pardir, "warm_rank.py"))["be_warm"]()
