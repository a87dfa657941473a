"""The packages that the algorithms of this package need where their models run."""

from rl_core.plugins import Requirement

LOSSES = Requirement("rl-algos", {"cpu": ("torch",), "cuda": ("torch",)}, ("rl_algos", "torch"))
"""Requirement of workers that compute the losses of this package, for `AlgorithmPlugin.requirements`."""

GRAMMARS = Requirement("rl-core", {"cpu": ("grammar",), "cuda": ("grammar",)}, ("xgrammar",))
"""Grammars of constrained completions, for rollout workers and engines."""
