"""The flash attention of a GPU's generation, in place of torch's own."""

from __future__ import annotations

import logging

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

logger = logging.getLogger(__name__)

OF_GENERATION = {9: ("FA3", 256), 10: ("FA4", 128)}
"""Major compute capability to the implementation of its own, as torch names it, and the largest heads that it takes."""


def activate_flash_attention(largest_head: int) -> str | None:
    """Make torch's flash attention the one of this GPU's generation, if its package is installed.

    FlashAttention 3 (module `flash_attn_interface`) is for Hopper, FlashAttention 4 (`flash_attn.cute`) for Blackwell;
    without them torch's own runs, which is FlashAttention 2. It stays so for the process.

    Args:
        largest_head: Entries of the model's largest query, key or value head; 0 if they are not known.

    Returns:
        Name of the implementation that runs; None for torch's own.
    """
    if not torch.cuda.is_available():
        return None
    name, limit = OF_GENERATION.get(torch.cuda.get_device_capability()[0], ("", 0))
    active: str | None = current_flash_attention_impl()
    if not name or not 0 < largest_head <= limit or active == name:
        return active
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:  # it is not installed, or its package is another build
        logger.info("attention_backend=auto runs torch's own flash attention; %s is not available: %s", name, error)
        return None
    logger.info("attention_backend=auto runs %s", name)
    return name
