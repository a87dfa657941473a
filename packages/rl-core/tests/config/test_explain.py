"""What `rl config explain` shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import DEFAULT, Config, Resolved, all_keys, assemble, explain, explain_all, load, values_of
from rl_core.errors import ConfigError


def test_a_key_is_explained_with_its_value_and_origin(run: Callable[..., Resolved[Any]], root: type[Config]) -> None:
    found = explain(root, "grpo.seed", run(overrides=["grpo.seed=7"]))
    assert (found.key, found.doc, found.type) == ("grpo.seed", "Seed of every random choice.", "int")
    assert (found.default, found.value, str(found.origin), found.required) == (42, 7, "command line", False)
    without = explain(root, "grpo.seed")
    assert (without.value, without.origin) == (42, DEFAULT)


def test_a_section_lists_its_keys(root: type[Config]) -> None:
    found = explain(root, "policy.generation")
    assert found.type == "section"
    names = [child.key.removeprefix("policy.generation.") for child in found.children]
    assert names == ["temperature", "top_k", "max_new_tokens", "stop_strings", "stop_token_ids", "vllm_cfg"]
    assert found.children[0].doc == "Divides the logits."
    assert explain(root, "grpo").doc == "Group relative policy optimization."
    assert explain(root, "loss_fn").doc == ""


def test_the_root_lists_the_sections(root: type[Config]) -> None:
    found = explain(root, "")
    assert [child.key for child in found.children] == ["algorithm", "grpo", "loss_fn", "policy", "data", "env"]
    assert [child.required for child in found.children] == [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("grpo.num_prompts_per_step", "int > 0"),
        ("grpo.max_num_steps", "int or null"),
        ("grpo.use_leave_one_out_baseline", "true or false"),
        ("loss_fn.kind", "one of: tis, icepop, seq-mask-tis or null"),
        ("loss_fn.reference_policy_kl_penalty", "float >= 0"),
        ("policy.precision", "one of: float32, bfloat16"),
        ("policy.attention", "one of: sdpa, flash"),
        ("policy.folder", "path"),
        ("policy.overrides", "mapping"),
        ("policy.overrides.a.b", "anything"),
        ("policy.layer_names", "mapping of str"),
        ("policy.generation.stop_strings", "list of str"),
        ("policy.generation.stop_token_ids", "list of int"),
        ("data.train", "section or list of section"),
        ("data.train[0].weight", "float > 0"),
        ("env", "mapping of section"),
        ("env.any.timeout", "float or never"),
    ],
)
def test_types_are_in_words(root: type[Config], key: str, text: str) -> None:
    assert explain(root, key).type == text


def test_below_lists_and_free_keys_stands_what_is_there(run: Callable[..., Resolved[Any]], root: type[Config]) -> None:
    resolved = run(overrides=["env.math.num_workers=2", "data.train=[{dataset_name: a}]"])
    assert [child.key for child in explain(root, "env", resolved).children] == ["env.math"]
    assert explain(root, "data.train[0].dataset_name", resolved).value == "a"


@pytest.mark.parametrize(
    ("key", "near"), [("grpo.sead", "grpo.seed"), ("temperature", "policy.generation.temperature")]
)
def test_an_unknown_key_names_the_nearest(root: type[Config], key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: no such key; did you mean {near}"):
        explain(root, key)


def test_a_malformed_key_is_refused(root: type[Config]) -> None:
    with pytest.raises(ConfigError, match="names joined by dots"):
        explain(root, "grpo..seed")


def test_a_key_is_explained_while_others_are_wrong(folder: Path, root: type[Config]) -> None:
    (folder / "recipe.yaml").write_text("algorithm: grpo\ngrpo: {seed: 7, num_promts: 3}\npolicy: {precision: half}\n")
    values = values_of(load("recipe.yaml"), root)
    found = explain(root, "grpo.seed", values)
    assert (found.value, str(found.origin)) == (7, "recipe.yaml:2")
    assert explain(root, "grpo.num_prompts_per_step", values).value == 32
    assert explain(root, "policy.precision", values).value == "half"
    assert explain(root, "policy", values).children[0].value is None


def test_a_wrong_interpolation_does_not_keep_others_from_being_explained(folder: Path, root: type[Config]) -> None:
    (folder / "recipe.yaml").write_text("grpo: {seed: '${oc.env:NOT_SET_ANYWHERE}', max_num_steps: '${grpo.seeed}'}\n")
    values = values_of(load("recipe.yaml"), root)
    assert explain(root, "grpo.seed", values).value == "${oc.env:NOT_SET_ANYWHERE}"
    assert explain(root, "grpo.max_num_steps", values).value is None


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("policy.precision", ("float32", "bfloat16")),
        ("grpo.use_leave_one_out_baseline", ("true", "false")),
        ("loss_fn.kind", ("tis", "icepop", "seq-mask-tis", "null")),
        ("policy.attention", ("sdpa", "flash")),
        ("grpo.max_num_steps", ()),
        ("env.any.timeout", ("never",)),
    ],
)
def test_values_that_a_type_lists_are_choices(root: type[Config], key: str, choices: tuple[str, ...]) -> None:
    assert explain(root, key).choices == choices


class Optimizer(Config):
    kwargs: dict[str, Any] = {"lr": 1e-6, "betas": [0.9, 0.999]}
    """Arguments of the optimizer."""


def test_an_entry_of_a_mapping_has_the_default_and_the_documentation_of_the_mapping(folder: Path) -> None:
    root = assemble("Root", {"optimizer": Optimizer})
    found = explain(root, "optimizer.kwargs.lr")
    assert (found.value, found.default, found.part_of) == (1e-6, 1e-6, "optimizer.kwargs")
    assert found.doc == "Arguments of the optimizer."
    inner = explain(root, "optimizer.kwargs.betas[1]")
    assert (inner.default, inner.part_of) == (0.999, "optimizer.kwargs")
    assert explain(root, "optimizer.kwargs.foreach").part_of == ""
    (folder / "recipe.yaml").write_text("optimizer: {kwargs: {betas: [0.8, 0.9]}}\n")
    values = values_of(load("recipe.yaml"), root)
    assert explain(root, "optimizer.kwargs.lr", values).value is None
    assert [child.key for child in explain(root, "optimizer.kwargs").children] == [
        "optimizer.kwargs.lr",
        "optimizer.kwargs.betas",
    ]


def test_every_key_is_explained_with_the_entries_of_defaults(root: type[Config]) -> None:
    found = {each.key: each for each in explain_all(root)}
    assert set(all_keys(root, {})) <= set(found)
    assert found["policy.generation.temperature"].doc == "Divides the logits."
    of_optimizer = {each.key: each.default for each in explain_all(assemble("Root", {"optimizer": Optimizer}))}
    assert of_optimizer["optimizer.kwargs.lr"] == 1e-6


def test_every_key_of_a_config_is_explained_with_its_value(folder: Path, root: type[Config]) -> None:
    (folder / "recipe.yaml").write_text("grpo: {seed: 7}\nenv: {mine: {num_workers: 2}}\n")
    found = {each.key: each for each in explain_all(root, values_of(load("recipe.yaml"), root))}
    assert (found["grpo.seed"].value, str(found["grpo.seed"].origin)) == (7, "recipe.yaml:1")
    assert found["env.mine.num_workers"].value == 2


def test_a_section_around_a_reference_to_a_variable_does_not_show_its_value(
    run: Callable[..., Resolved[Any]], root: type[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "secret")
    found = run(overrides=["policy.model_name=${oc.env:WHERE}/m"])
    assert explain(root, "policy", found).value["model_name"] == "${oc.env:WHERE}/m"
    assert "secret" not in str(explain(root, "", found))
