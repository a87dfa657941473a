"""The estimator and the loss that the README shows, as printed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rollouts_builder import make_group

from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import ESTIMATORS, advantages_of
from rl_algos.grpo.plugin import grpo_section
from rl_algos.losses.surrogates import SURROGATES
from rl_algos.policy_gradient.config import CustomLossConfig
from rl_algos.policy_gradient.plugin import loss_fn_section, policy_loss_problems
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_core.config import assemble, load, resolve, settings_of
from rl_core.plugins import resolve as resolve_name
from rl_core.testing.documents import read_document
from rl_core.torch.rows import to_rows
from rl_core.user_code import implementation_name


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The two files in a folder, and the recipe between them read."""
    folder = tmp_path_factory.mktemp("user")
    for block in read_document(Path(__file__).parents[2] / "README.md").blocks:
        if block.file in ("mine.py", "run.yaml"):
            (folder / block.file).write_text(block.text)
    (folder / "grpo-arithmetic.yaml").write_text("loss_fn: {kl: {weight: 0.0}}\n")
    raw = load(folder / "run.yaml")
    sections = {"grpo": grpo_section(raw.select("grpo")), "loss_fn": loss_fn_section(raw.select("loss_fn"))}
    return resolve(raw, assemble("Root", sections)).config


def test_its_estimator_gives_the_last_token_the_whole_advantage(config):
    assert isinstance(config.grpo, GRPOConfig)
    found = advantages_of([make_group("a", [1.0, 0.0])], config.grpo)
    np.testing.assert_allclose(found[0], [0, 0, 0, 0.4, 0.5])
    np.testing.assert_allclose(found[1], [0, 0, 0, -0.4, -0.5])


def test_its_loss_is_the_formula(config):
    assert isinstance(config.loss_fn, CustomLossConfig)
    groups = [make_group("a", [1.0, 0.0])]
    batch = with_advantages(build_batch(groups, config.grpo), advantages_of(groups, config.grpo))
    loss = resolve_name(config.loss_fn.name)(temperature=1.0, **settings_of(config.loss_fn))
    compute = resolve_name(implementation_name(loss, loss.implementation))
    logprobs = torch.linspace(-2.0, -0.1, 10)
    rows = to_rows(batch.only(["tokens", *loss.columns]), torch.device("cpu"))
    found = compute(loss, {"logprobs": logprobs}, rows).loss(loss.totals(batch)).item()
    sampled, advantages = [3, 4, 8, 9], [0.4, 0.5, -0.4, -0.5]
    terms = [-(advantage + 0.01) * logprobs[at].item() for at, advantage in zip(sampled, advantages, strict=True)]
    assert found == pytest.approx(np.mean(terms), rel=1e-6)


def variants():
    """Rows of the table of variants: name, and the config in its code spans."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| variant | keys | paper |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, keys = line.strip("|").split("|")[:2]
        yield name.strip(), "\n".join(re.findall(r"`(\w+: \{.*?\})`", keys))


@pytest.mark.parametrize(("name", "written"), list(variants()), ids=[name for name, _ in variants()])
def test_the_keys_of_a_variant_are_a_valid_config(name, written, tmp_path):
    (tmp_path / "run.yaml").write_text(written)
    raw = load(tmp_path / "run.yaml")
    sections = {"grpo": grpo_section(raw.select("grpo")), "loss_fn": loss_fn_section(raw.select("loss_fn"))}
    config = resolve(raw, assemble("Root", sections)).config
    assert list(policy_loss_problems(config.loss_fn)) == []
    assert config.loss_fn.aggregation.name in config.loss_fn.surrogate.aggregations


def test_every_surrogate_and_estimator_is_in_the_table():
    table = "\n".join(written for _, written in variants())
    alone = {"clip", "dppo-kl"}  # the default, one beside another
    assert [name for name in SURROGATES if name not in alone and name not in table] == []
    assert [name for name in ESTIMATORS if name not in table] == []
