"""Training on PyTorch DTensor and FSDP2, and generation with Hugging Face transformers."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
