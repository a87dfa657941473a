"""Errors in a document are found without running it."""

import pytest
from document_checks import broken_links, check_commands, check_yaml, missing_places, unknown_keys

from rl_core.testing.documents import DocumentError, read_document


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "guide.md"
        path.write_text(text)
        return read_document(path)

    return write


@pytest.mark.parametrize(
    "command",
    [
        "rl train no-such-recipe",
        "rl train sft-arithmetic sft.max_num_stepz=1",
        "RAY_ADDRESS=auto uv run rl train sft-arithmetic --frseh",
        "cd here && rl doctor sft-arithmetic cluster.gpus_per_nodes=2",
        "rl trian sft-arithmetic",
        "rl train runs/mine grpo.max_num_stepz=3",
        "rl train --from runs/mine:300 loss_fn.ratio_clip=0.3",
        "rl convert runs/a",
        'pip install "rl-vllm[gpu]"',
        "pip install rl-nothing",
        "uv run tox -e nothing",
        "just nothing",
        "just test nothing",
        "uv run benchmarks/nothing.py",
    ],
)
def test_a_command_that_could_not_run_is_found(written, tmp_path, command):
    (block,) = written(f"```sh check\n{command}  # why\n```\n").blocks
    with pytest.raises(DocumentError, match=r"guide\.md, line 1"):
        check_commands(block, tmp_path)


def test_commands_that_could_run_pass(written, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: sft-arithmetic\n")
    text = "A=1 rl train mine.yaml sft.seed=1 \\\n    --fresh\nrl train runs/mine\n"
    text += "rl train --from runs/mine:3 grpo.seed=2\njust test core -k ragged\njust --list\n"
    text += "pip install 'rl-vllm[cpu]' && ray start --head\n"
    (block,) = written(f"```sh check\n{text}```\n").blocks
    check_commands(block, tmp_path)


@pytest.mark.parametrize(
    ("fence", "text"),
    [
        ("yaml", "policy: {modle_name: x}"),
        ("yaml", "sft: {num_prompts_per_step: 3}"),
        ("yaml over=grpo-arithmetic", "cluster: {cpu_ranks_per_node: 0}"),
        ("yaml", "defaults: no-such-recipe"),
    ],
)
def test_yaml_that_is_not_of_a_config_is_found(written, tmp_path, fence, text):
    (block,) = written(f"```{fence}\n{text}\n```\n").blocks
    with pytest.raises(DocumentError, match=r"guide\.md, line 1"):
        check_yaml(block, tmp_path)


def test_keys_that_no_config_has_are_found(written):
    keys = "`grpo.seed`, `sft.seed=3`, `policy.optimizer.kwargs.lr`, `a.b`, `grpo.json` and `grpo.sead`"
    text = f"{keys}\n```text\n`sft.x`\n```"
    assert unknown_keys(written(text)) == ["grpo.sead"]


def test_links_to_nothing_are_found(written, tmp_path):
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    links = (
        "[a](other.md#a-heading-with-code) [b](https://example.org/x) [c](nowhere.md) [d](other.md#nowhere) [e](#gone)"
    )
    assert broken_links(written(links)) == ["nowhere.md", "other.md#nowhere", "#gone"]


def test_places_in_the_project_that_do_not_exist_are_found(written):
    present = (
        "`rl_core.model`, `rl_core.model.Model.infer`, `rl_core.rollouts`, `rl_algos.torch.policy_loss:compute`, "
        "`docs/README.md`, `rl-core/tests/test_weights.py`, `rl_algos/grpo/loop.py`, `packages/*/CHANGELOG.md`, "
        "`integration-tests/test_documents.py::test_config_keys_exist`, `rl_core.testing.generator.GeneratorSuite`"
    )
    absent = [
        "rl_core.modle",
        "rl_core.model.Model.infers",
        "rl_core.model.Modell",
        "rl_nothing.model",
        "docs/nowhere.md",
        "rl-core/tests/test_nothing.py",
        "rl_algos/grpo/loops.py",
        "integration-tests/test_documents.py::test_nothing",
        "rl_algos.torch.policy_loss:nothing",
    ]
    of_readers = (
        "`checkpoints/step_<n>/`, `runs/mine`, `my_rewards.py:exact`, `Qwen/Qwen3-0.6B`, `time/step`, `rl view`"
    )
    named = ", ".join(f"`{each}`" for each in absent)
    assert missing_places(written(f"{present}\n{named}\n{of_readers}\n")) == absent
