"""Pages that `rl plan` writes are current."""

import subprocess
import sys

from document_checks import ROOT


def test_the_page_of_models_on_gpus_is_current():
    done = subprocess.run(
        [sys.executable, "tools/write_models_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
