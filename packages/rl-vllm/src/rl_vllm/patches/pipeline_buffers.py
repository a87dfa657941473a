"""Buffers of a pipeline rank for the activations of the rank before it, on CPU.

- Fault: a rank makes them in its first dummy run. On CPU there is none without compilation, so the first request ends
  an engine with several pipeline ranks.
- vLLM 0.32.0, `vllm/v1/worker/cpu_model_runner.py` (`CPUModelRunner.warming_up_model`) and
  `vllm/v1/worker/gpu_model_runner.py` (`GPUModelRunner.sync_and_gather_intermediate_tensors`).
- Upstream: no upstream issue found on 2026-11-30.
- Delete when `tests/patches/test_pipeline_buffers.py::test_vllms_pipeline_rank_begins_without_buffers` fails.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def make_pipeline_buffers_on_cpu() -> None:
    """Make the buffers when the first activations arrive."""
    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    @wraps(gather)
    def gathered(self: CPUModelRunner, *args: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args)

    CPUModelRunner.sync_and_gather_intermediate_tensors = gathered
