"""A worker's process is set up as Ray's own script does it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from rl_core.testing.isolation import loaded_by
from rl_launch.cluster import setup_worker

OF_RAY = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
WORKER = "import json, os, sys; print(json.dumps([sys.argv, os.environ.get('HERE'), os.environ.get('NOWHERE')]))"


def printed(script, language, **context):
    """What a worker prints that one of the scripts has set up."""
    arguments = [f"--serialized-runtime-env-context={json.dumps(context)}", f"--language={language}"]
    command = [sys.executable, str(script), "-c", WORKER, "a b", "$HOME", "--node-ip=127.0.0.1", *arguments]
    environment = {**os.environ, "GIVEN": "given"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("language", "context"),
    [
        pytest.param("PYTHON", {}, id="nothing"),
        pytest.param("PYTHON", {"env_vars": {"HERE": "${GIVEN} $GIVEN", "NOWHERE": "x${ABSENT}y"}}, id="variables"),
        pytest.param("PYTHON", {"py_executable": f"{shlex.quote(sys.executable)} -P"}, id="interpreter"),
        pytest.param("PYTHON", {"command_prefix": ["HERE=prefix"]}, id="what only Ray knows"),
    ],
)
def test_a_worker_starts_as_by_rays_own_script(language, context):
    found = printed(setup_worker.__file__, language, **context)
    assert found == printed(OF_RAY, language, **context)
    assert found[0] == 0
    assert json.loads(found[1])[0] == ["-c", "a b", "$HOME", "--node-ip=127.0.0.1"]


def test_it_imports_no_ray():
    assert "ray" not in loaded_by("rl_launch.cluster.setup_worker")
