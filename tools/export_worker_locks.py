"""Write the exports of the lock that rl-launch ships; run it after every change of uv.lock.

`--check` names the stale ones instead.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from rl_launch.worker_envs.plan import export, export_name, members_of
from rl_launch.worker_envs.spec import Wanted

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "packages/rl-launch/src/rl_launch/worker_envs/locks"
# the driver's own: never in a worker
DRIVER_ONLY = ("rl-launch", "rl-integration-tests")


def exports() -> dict[str, str]:
    """Return every export by file name: each package alone and with each of its extras."""
    texts: dict[str, str] = {}
    for name, folder in members_of(ROOT).items():
        if name in DRIVER_ONLY:
            continue
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for extra in ("", *project.get("optional-dependencies", {})):
            texts[export_name(name, extra)] = export(ROOT, [Wanted(name, (extra,) if extra else ())])
    return texts


def stale() -> list[str]:
    """Return file names that differ from the lock, are missing, or belong to nothing."""
    texts = exports()
    there = {path.name: path.read_text() for path in TARGET.glob("*.txt")}
    return sorted(name for name in {*texts, *there} if texts.get(name) != there.get(name))


def main() -> int:
    if "--check" in sys.argv[1:]:
        names = stale()
        if names:
            sys.stderr.write(f"stale: {', '.join(names)}; run python tools/export_worker_locks.py\n")
        return int(bool(names))
    TARGET.mkdir(exist_ok=True)
    for path in TARGET.glob("*.txt"):
        path.unlink()
    for name, text in exports().items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
