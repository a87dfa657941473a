"""Every family on every mesh is one process.

Some of the cases, so that every family is there, every mesh that is not a part of another, and each kind of mesh with
every layout of rows and with all that trains. All of them run with `--every-case`.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from transformers import AutoConfig

from rl_core.plugins import MeshCase
from rl_core.selfcheck.torch.selfcheck import case_on
from rl_core.testing.exhaustive import partly_exhaustive
from rl_dtensor.plugin import HELD_FAMILIES
from rl_dtensor.selfcheck import CHECK, CONTEXT, MESHES, PIPELINE, TENSOR, write_tiny

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
UNSHARDED = {"gradient_accumulation": "unsharded"}
KINDS: Mapping[str, str] = {
    "1": "data",
    "fsdp2": "data",
    "hsdp 2x2": "data",
    "tp2": "tensor",
    "tp2+sp": "tensor",
    "tp2 x fsdp2": "tensor",
    "cp2": "context",
    "cp2 ulysses": "context",
    "cp2 x fsdp2": "context",
    "cp2 x tp2": "tensor",
    "pp2": "pipeline",
    "pp2 x fsdp2": "pipeline",
    "ep2 x fsdp2": "expert",
}
"""The kind of split of each mesh."""
IN_OTHERS = ("1", "tp2", "cp2", "cp2 x fsdp2", "pp2")
"""Meshes whose axes another one has as well."""

EVERY_CASE = [
    (family, case_on(MESHES, mesh, is_packed=is_packed, has_adapters=lora))
    for family, mesh, is_packed, lora in product(FAMILIES, MESHES, (True, False), (False, True))
    if not mesh.startswith("ep") or family in EXPERTS
]


FIRST = [(family, case) for family, case in EVERY_CASE if case.mesh not in IN_OTHERS]


def pairs(family: str, case: MeshCase) -> set[frozenset[tuple[str, str]]]:
    """Pairs of values that meet in a case, and its family and mesh."""
    of_rows = {("layout", str(case.is_packed)), ("trains", str(case.has_adapters))}
    met = {frozenset({("kind", KINDS[case.mesh]), value}) for value in of_rows}
    return met | {frozenset({("family", family)}), frozenset({("mesh", case.mesh)})}


def covering(cases: Sequence[tuple[str, MeshCase]]) -> list[tuple[str, MeshCase]]:
    """Few cases in which every pair that meets in some case meets: always the one with most pairs that are missing."""
    missing = set().union(*(pairs(*case) for case in cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(*case) & missing)))
        missing -= pairs(*chosen[-1])
    return chosen


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = EVERY_CASE if metafunc.config.getoption("--every-case") else covering(FIRST)
        metafunc.parametrize(("family", "case"), cases, ids=str)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A tiny model of each family, and what one process does with it, made when first asked for."""
    folders, expected = {}, {}

    def of(family, lora):
        if family not in folders:
            config = AutoConfig.for_model(family, **FAMILIES[family])
            folders[family] = write_tiny(config, tmp_path_factory.mktemp(family))
        if (family, lora) not in expected:
            expected[family, lora] = CHECK.expect(folders[family], has_adapters=lora)
        return folders[family], expected[family, lora]

    return of


def test_a_mesh_trains_and_streams_as_one_process(ranks, prepared, family, case):
    folder, expected = prepared(family, case.has_adapters)
    outcome = CHECK.check_case(ranks, folder, case, expected)
    assert outcome.verdict == "exact", outcome


TOGETHER = [
    ("qwen3", 4, {**PIPELINE, **TENSOR, "sequence_parallel": True}),
    ("qwen3_moe", 2, {**CONTEXT, "expert_parallel_size": 2}),
    ("mixtral", 4, {"expert_parallel_size": 2, "cpu_offload": True, **UNSHARDED}),
    ("qwen3", 4, {**PIPELINE, **CONTEXT}),
    ("llama", 4, {"dp_replicate_size": 2, **UNSHARDED}),
    ("llama", 4, {**TENSOR, **UNSHARDED}),
    ("llama", 4, {**PIPELINE, **UNSHARDED}),
]
"""Family, number of ranks, settings."""


@pytest.mark.parametrize(
    ("family", "num_ranks", "settings"), partly_exhaustive(TOGETHER, always=TOGETHER[1:3]), ids=str
)
def test_other_axes_go_together(ranks, prepared, family, num_ranks, settings):
    folder, expected = prepared(family, False)
    case = MeshCase("other", num_ranks, settings, is_packed=True, has_adapters=False)
    outcome = CHECK.check_case(ranks, folder, case, expected)
    assert outcome.verdict == "exact", outcome


def test_the_families_that_a_run_need_not_check_are_those_held_here_and_with_images():
    # the language models of families that `test_vision` holds against transformers
    assert {*FAMILIES, "qwen2_5_vl_text", "qwen3_vl_text"} == HELD_FAMILIES
