"""Post-training algorithms: losses, advantages, data and rollout logic, and the loops."""

import os

# transformers only makes tokenizers here, without PyTorch, which it would advise to install
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
