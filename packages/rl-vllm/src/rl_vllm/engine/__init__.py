"""How vLLM's engine is started, asked and watched."""
