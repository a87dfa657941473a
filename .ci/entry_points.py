"""Load every plugin of the installed packages, in an environment without an engine."""

import sys

from rl_core import plugins

for group in plugins.KINDS:
    if not plugins.names(group):
        sys.exit(f"no plugin in {group}")
    for name in plugins.names(group):
        plugins.plugin(group, name)
