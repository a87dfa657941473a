"""Messages of the `tinker` client: its types, and its protobuf messages.

The client imports torch if it is installed, to turn tensors into torch's. A server needs none of that, so torch is
hidden during the import: a None makes an import fail, as documented.
"""

from __future__ import annotations

import sys

_hides_torch = "torch" not in sys.modules
if _hides_torch:
    sys.modules["torch"] = None  # type: ignore[assignment]
try:
    from tinker import types as types
    from tinker.proto import tinker_public_pb2 as pb
finally:
    if _hides_torch:
        del sys.modules["torch"]

__all__ = ["pb", "types"]
