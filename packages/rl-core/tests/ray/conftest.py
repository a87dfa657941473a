"""A Ray of one node, which the tests share."""

from collections.abc import Iterator

import pytest
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


@pytest.fixture(scope="session")
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
