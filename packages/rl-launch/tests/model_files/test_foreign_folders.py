"""Checkpoints of other frameworks are recognised by their files."""

import pytest

from rl_launch.model_files.model_folder import MODEL_FILES, folder_problems
from rl_launch.model_files.weight_files import FOREIGN_KINDS, foreign_kind

FILES = {
    "a DeepSpeed checkpoint": "zero_to_fp32.py",
    "a Megatron-LM checkpoint": "latest_checkpointed_iteration.txt",
    "a PyTorch distributed checkpoint (torch.distributed.checkpoint)": "__0_0.distcp",
    "a NeMo checkpoint": "model.nemo",
    "a GGUF file of llama.cpp": "model.Q4_K_M.gguf",
    "a model in Meta's own format": "consolidated.00.pth",
    "a model in Mistral's own format": "consolidated.safetensors",
    "a Flax or TensorFlow model": "flax_model.msgpack",
    "a pickled adapter": "adapter_model.bin",
    "a model with pickled weights": "pytorch_model-00001-of-00002.bin",
}


@pytest.mark.parametrize("kind", FOREIGN_KINDS, ids=lambda kind: kind.name)
def test_a_framework_is_named_with_the_way_to_hugging_face_files(kind, tmp_path):
    (tmp_path / FILES[kind.name]).touch()
    assert foreign_kind(tmp_path) is kind
    (tmp_path / "config.json").write_text("{}")
    (problem,) = folder_problems("policy.model_name", str(tmp_path), MODEL_FILES)
    assert problem.got == str(tmp_path)
    assert kind.name in problem.reason
    assert problem.remedy == kind.remedy


def test_an_unknown_folder_is_of_no_framework(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert foreign_kind(tmp_path) is None
