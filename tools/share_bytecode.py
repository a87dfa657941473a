"""Take over compiled modules from the other environments of tox: `python tools/share_bytecode.py [FOLDER]`.

The environments of the packages have most of their distributions in common. To compile what tests import of torch and
transformers takes seconds, in each environment and, because the workers of xdist start together, in each worker.

Python compares a compiled module with the size and time of its source, which uv links into every environment. A module
of another version is compiled again.

Environments are those of `FOLDER`, or the folder that the environment of the interpreter is in.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

_COMPILED = "__pycache__"


def take_over(ours: Path, theirs: Path) -> int:
    """Link the compiled modules of the packages that both environments have; returns their number.

    Args:
        ours: `site-packages` that lacks compiled modules.
        theirs: `site-packages` of another environment.
    """
    count = 0
    for folder, _, names in os.walk(theirs):
        target = ours / Path(folder).relative_to(theirs)
        if target.name != _COMPILED or not target.parent.is_dir():
            continue
        target.mkdir(exist_ok=True)
        for name in names:
            with suppress(FileExistsError):
                os.link(Path(folder, name), target / name)
                count += 1
    return count


def main() -> None:
    """Take over what other environments have compiled."""
    ours = Path(sysconfig.get_path("purelib"))
    environments = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(sys.prefix).parent
    for theirs in environments.glob(f"*/{ours.relative_to(sys.prefix)}"):
        if theirs != ours:
            take_over(ours, theirs)


if __name__ == "__main__":
    main()
