"""The Dockerfile of the images lints. `tox -e manifests` installs the tool."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def test_the_dockerfile_lints():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(ROOT / "images" / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)
