"""Conformance suites that every backend subclasses in its tests, and fakes for testing loops."""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
