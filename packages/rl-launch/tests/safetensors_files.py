"""Safetensors files of tests, written without a library."""

import json
import math


def write_weights(path, shapes=None):
    """A file of float32 zeros.

    Args:
        shapes: of the tensors, by name.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in (shapes or {}).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
