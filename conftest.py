"""Tests side by side: each of pytest-xdist's workers has cores of its own.

JAX and PyTorch take every core they see, and two of them on the same two cores are slower than one after the other. A
worker's share is set here, before either is loaded.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[number::count] or os.sched_getaffinity(0))
