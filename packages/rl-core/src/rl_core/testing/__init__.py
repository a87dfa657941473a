"""Conformance suites that every backend subclasses in its tests, and fakes for testing loops."""
