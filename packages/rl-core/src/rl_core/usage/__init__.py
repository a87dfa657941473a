"""Resources that processes, machines and GPUs use, read for monitoring."""
