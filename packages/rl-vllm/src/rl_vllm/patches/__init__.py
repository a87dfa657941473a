"""Corrections of vLLM 0.32: each file names the fault it mends and the test that tells when to delete it."""
