"""Images, scripts and workflows lint, and what they use is pinned. `tox -e manifests` installs the tools."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KUBERNETES = "packages/rl-launch/src/rl_launch/submit/kubernetes"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LINTED = {
    "the Dockerfile": ["hadolint", "images/Dockerfile"],
    # the script of Slurm is a template, which its own tests render first
    "scripts": [
        "shellcheck",
        ".ci/run",
        "images/worker_env.sh",
        "tools/publish_site.sh",
        f"{KUBERNETES}/run.sh",
        f"{KUBERNETES}/stop.sh",
    ],
    "workflows": ["zizmor", "--offline", "--quiet", "--format=plain", ".github"],
}


@pytest.mark.parametrize("what", LINTED)
def test_a_linter_finds_nothing(what):
    name, *arguments = LINTED[what]
    program = shutil.which(name, path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_version(workflow):
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_base_images_are_pinned_by_digest():
    text = (ROOT / "images" / "Dockerfile").read_text()
    images = re.findall(r"^ARG (?:BASE|COMPILER)=(.*)$", text, re.MULTILINE)
    assert len(images) == 2
    for image in images:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image
