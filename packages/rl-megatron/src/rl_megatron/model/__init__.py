"""Megatron Core models: architecture, layers, attention and experts."""
