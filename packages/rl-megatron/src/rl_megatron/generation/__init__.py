"""Generation with megatron-core, for models that no other engine knows."""
