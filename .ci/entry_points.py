"""Load every plugin of the installed packages, in an environment without an engine."""

import sys

from rl_core import plugins

GROUPS = (plugins.POLICIES, plugins.GENERATORS, plugins.ENVIRONMENTS, plugins.ALGORITHMS, plugins.DATASETS)

for group in GROUPS:
    if not plugins.plugins(group):
        sys.exit(f"no plugin in {group}")
