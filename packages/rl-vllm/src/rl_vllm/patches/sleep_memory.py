"""Sleep of an engine next to other processes on its GPU.

- Fault: the worker compares the GPU's free memory before and after it has gone to sleep, and fails if there is less.
  Another process may have allocated memory meanwhile. The engine then keeps its memory unmapped and counts as awake.
- vLLM 0.32.0, `vllm/v1/worker/gpu_worker.py`, `Worker.sleep`.
- Upstream: https://github.com/vllm-project/vllm/pull/45620 (closed) describes the fault and mends it.
- Delete when `tests/patches/test_sleep_memory.py::test_vllms_worker_fails_if_another_process_takes_memory` fails.
"""

from __future__ import annotations

import logging
from functools import wraps

from vllm.v1.worker.gpu_worker import Worker

_log = logging.getLogger(__name__)

MESSAGE = "Memory usage increased after sleeping."


def sleep_beside_others() -> None:
    """Make vLLM's worker go to sleep whatever other processes do with the GPU's memory; it has freed its own."""
    sleep = Worker.sleep
    if hasattr(sleep, "__wrapped__"):
        return

    @wraps(sleep)
    def patched(self: Worker, level: int = 1) -> None:
        try:
            sleep(self, level)
        except AssertionError as error:
            if str(error) != MESSAGE:
                raise
            _log.warning("other processes took more memory of the GPU than the engine freed when it went to sleep")

    Worker.sleep = patched
