"""Experts that every token passes."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP


class SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, with the weight of their gate on the device of the other weights.

    megatron-core 0.16.1 leaves it on the host.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_weight is not None:
            self.gate_weight.data = self.gate_weight.data.to(torch.cuda.current_device())
