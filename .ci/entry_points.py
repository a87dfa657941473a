"""Loads every plugin of the installed packages, in an environment that has no engine."""

import sys

from rl_core import registry

GROUPS = (registry.POLICIES, registry.GENERATORS, registry.ENVIRONMENTS, registry.ALGORITHMS, registry.DATASETS)

for group in GROUPS:
    if not registry.plugins(group):
        sys.exit(f"no plugin in {group}")
