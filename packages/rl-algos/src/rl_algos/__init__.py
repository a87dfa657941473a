"""Post-training algorithms: losses, advantages, data and rollout logic, and the loops."""

import os

# transformers makes tokenizers here, for which it needs no PyTorch, and would advise to install it
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
