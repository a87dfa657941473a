"""Names of rl-algos that the sibling packages use, kept until the next breaking version (`service.pyi` lists them).

Users' code needs only the public names of `rl_algos`.
"""

from rl_core.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
