"""Every family on every mesh is one process: every pair of family, mesh, layout of rows and what trains meets."""

import pytest
from transformers import AutoConfig

from rl_dtensor.selfcheck import MESHES, TOLERANCE, Case, check_case, expect, write_tiny

SLIDING = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"num_hidden_layers": 2, "use_sliding_window": True, "layer_types": SLIDING, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": SLIDING, "tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "mixtral": {},
}
EXPERTS = ("qwen3_moe", "mixtral")
CASES = [
    (family, Case(mesh, is_packed=(i + j) % 2 == 0, lora=(i // 2 + j) % 2 == 1))
    for i, family in enumerate(FAMILIES)
    for j, mesh in enumerate(MESHES)
    if (family in EXPERTS) == mesh.startswith("ep") or (family != "mixtral" and not mesh.startswith("ep"))
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A tiny model of each family, and what one process does with it, made when first asked for."""
    folders, expected = {}, {}

    def of(family, lora):
        if family not in folders:
            config = AutoConfig.for_model(family, **FAMILIES[family])
            folders[family] = write_tiny(config, tmp_path_factory.mktemp(family))
        if (family, lora) not in expected:
            expected[family, lora] = expect(folders[family], lora=lora)
        return folders[family], expected[family, lora]

    return of


@pytest.mark.parametrize(("family", "case"), CASES, ids=str)
def test_a_mesh_trains_and_streams_as_one_process(ranks, prepared, family, case):
    folder, expected = prepared(family, case.lora)
    outcome = check_case(ranks, folder, case, expected)
    assert not outcome.is_off(TOLERANCE), outcome
