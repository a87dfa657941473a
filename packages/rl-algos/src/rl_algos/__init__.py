"""Post-training algorithms: losses, advantages, data and rollout logic, and the loops."""

import os

from rl_core.exports import lazy_exports

# transformers only makes tokenizers here, without PyTorch, which it would advise to install.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__getattr__, __dir__ = lazy_exports(__name__)
