"""Oracles and senders for the conformance suites, in torch and transformers."""
