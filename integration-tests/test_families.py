"""Families that train with images start a run by the table of their backend, without a check or a switch."""

import subprocess
from types import SimpleNamespace

import pytest
from runs import python_of

from rl_core.plugins import POLICIES, plugin
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.settings import FAMILIES
from rl_launch.commands import preparation

WRITE = """
import sys
from pathlib import Path
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model

for family in sys.argv[2:]:
    write_tiny_vision_model(Path(sys.argv[1], family), family, tie_word_embeddings=False)
"""
"""Writes a tiny model of each family in the trainer's environment, which has torch."""


@pytest.fixture(scope="module")
def python():
    return python_of(POLICIES, "dtensor")


@pytest.fixture(scope="module")
def models(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([python, "-c", WRITE, str(folder), *FAMILIES], capture_output=True, check=True)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_images_starts_by_the_table(family, python, models, monkeypatch):
    monkeypatch.setattr(preparation, "_proof", lambda *_: pytest.fail("the table has no row for this model"))
    for is_packed in (True, False):
        for adapts, mesh in ((False, {"context_parallel_size": 2}), (True, {"tensor_parallel_size": 2}), (True, {})):
            section = SimpleNamespace(
                model_name=str(models / family),
                family_check="auto",
                trust_remote_code=None,
                vision=SimpleNamespace(enabled=True),
                dtensor_cfg=DTensorConfig(**mesh),
                sequence_packing=SimpleNamespace(enabled=is_packed),
                lora_cfg=SimpleNamespace(enabled=adapts),
            )
            preparation.prove_family(section, "policy", plugin(POLICIES, "dtensor"), python)
