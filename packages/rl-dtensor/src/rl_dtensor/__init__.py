"""Training on PyTorch DTensor and FSDP2, and generation with Hugging Face transformers."""
