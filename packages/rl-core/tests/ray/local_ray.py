"""A Ray of one node, for the tests of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray

SETTINGS = {
    "address": "local",
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
    # no idle Python for each CPU
    "_system_config": {"prestart_worker_first_driver": False},
}
ATTEMPTS = 3
"""Attempts to start it: a raylet misses its deadline of 30 s on a busy machine."""


@contextmanager
def local_ray() -> Iterator[None]:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(**SETTINGS)
            break
        except Exception:
            ray.shutdown()
            if attempt == ATTEMPTS:
                raise
    yield
    ray.shutdown()
