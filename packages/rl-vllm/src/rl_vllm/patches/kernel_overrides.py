"""Fallbacks of Triton kernels on CPU, registered in a process that has loaded llvmlite.

- Fault: when an engine starts, vLLM looks for kernels in all loaded modules, and takes the attribute `__dict__` of
  every value for a mapping. A library handle of llvmlite answers any attribute with a C function, so that no engine
  starts in a process that has imported numba, such as one in which an engine with n-grams has run.
- vLLM 0.32.0, `vllm/triton_utils/dispatcher.py`, `_rebind_kernels`.
- Upstream: no upstream issue found on 2026-11-27. https://github.com/vllm-project/vllm/pull/43048 (open) is an
  earlier form of the dispatcher.
- Delete when `tests/patches/test_kernel_overrides.py::test_vllm_takes_any_attribute_for_a_mapping` fails.
"""

from __future__ import annotations

from typing import Any

from vllm.triton_utils import dispatcher


def skip_odd_namespaces() -> None:
    """Make vLLM pass over values whose `__dict__` is not a mapping."""
    dispatcher.vars = namespace


def namespace(value: Any) -> dict[str, Any]:
    """Return `vars(value)`; empty if that is not a dict."""
    found = vars(value)
    return found if isinstance(found, dict) else {}
