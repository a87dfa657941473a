"""What vLLM has to know of a model's class before it builds an engine, on CPU.

- Fault: for each class that a machine has not seen before, vLLM starts a process that imports vLLM, transformers and
  the model, so that the first process does not initialise CUDA. It does so on CPU too, for 10 s of processor time.
- vLLM 0.32.0, `vllm/model_executor/models/registry.py`, `_LazyRegisteredModel.inspect_model_cls`.
- Upstream: https://github.com/vllm-project/vllm/issues/19317 (open), which asks for a switch.
- Delete when `tests/patches/test_model_inspection.py::test_vllm_inspects_a_model_in_another_process` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

T = TypeVar("T")


def inspect_in_this_process() -> None:
    """Make vLLM import the class of a model where it will run it, on CPU."""
    run_in_subprocess = registry._run_in_subprocess

    @wraps(run_in_subprocess)
    def run(inspect: Callable[[], T]) -> T:
        return inspect() if current_platform.is_cpu() else run_in_subprocess(inspect)

    registry._run_in_subprocess = run
