"""Errors in a document are found without running it."""

import pytest
from document_checks import (
    broken_links,
    check_commands,
    check_yaml,
    missing_places,
    private_names,
    unknown_commands,
    unknown_keys,
)
from quoted_messages import quoted_messages, unknown_messages

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


def test_quoted_messages_that_nothing_prints_are_found(written):
    printed = ["no answer within ... s", "the process ended", "... is in use by ...", "rank ... failed: ..."]
    # a word is wrong; the order is wrong; only a docstring has it; nothing is quoted
    absent = ["no answer in ... s", "failed: ... rank", "A worker's process ended without an answer", "..."]
    text = "".join(f"> `{message}`\n\nWhy.\n\n" for message in [*printed, *absent])
    document = written(f"{text}> ``with `ticks` in it``\n\n> A quotation.\n")
    assert quoted_messages(document) == [*printed, *absent, "with `ticks` in it"]
    assert unknown_messages(document) == [*absent, "with `ticks` in it"]


def test_links_to_nothing_are_found(written, tmp_path):
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    links = (
        "[a](other.md#a-heading-with-code) [b](https://example.org/x) [c](nowhere.md) [d](other.md#nowhere) [e](#gone) "
        "![f](figures/nowhere.svg)"
    )
    assert broken_links(written(links)) == ["nowhere.md", "other.md#nowhere", "#gone", "figures/nowhere.svg"]


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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("```python\nfrom rl_core.data.batch import Batch\n```", ["rl_core.data.batch"]),
        ("```python\n>>> from rl_core import Batch, Missing\n```", ["rl_core.Missing"]),
        ("```python\nfrom rl_core import (\n    Batch,\n    Missing,\n)\n```", ["rl_core.Missing"]),
        ("`rl_core.model.Loss` and `rl_core.Los`", ["rl_core.model.Loss", "rl_core.Los"]),
        (
            "```yaml\nrewards: [rl_core.environments.rewards:thinking_format]\n```",
            ["rl_core.environments.rewards:thinking_format"],
        ),
        ("`rl_core.torch.loss.LossSums`", ["rl_core.torch.loss.LossSums"]),
        ("```sh\npython -m rl_envs.sandbox.missing\n```", ["rl_envs.sandbox.missing"]),
    ],
)
def test_names_that_are_not_public_are_found(text, names):
    assert private_names(text) == names


def test_public_names_pass():
    text = "`rl_core.Loss`, `rl_core.Loss.totals`, `rl_core.torch.LossSums`, `rl_core:thinking_format`\n"
    text += "`python -m rl_envs.sandbox.abuses`, `rl_core/data/batch.py` and the group `rl_megatron.families`\n"
    text += "```python\nfrom rl_core import Batch, Ragged  # why\nimport rl_core.torch\n```\n"
    text += "Write `from rl_core import Batch`, and no more."
    assert private_names(text) == []


@pytest.mark.parametrize(
    "command",
    ["rl look", "rl look runs/a", "rl config shwo", "rl show --vall", "rl train x.yaml --frseh", "rl doctor x --jsn"],
)
def test_inline_commands_that_do_not_exist_are_found(command):
    assert unknown_commands(f"Run `{command}` and `rl train x.yaml grpo.seed=1`.") == [command]


def test_inline_commands_that_exist_pass():
    commands = ("rl --version", "rl config", "rl config\nexplain KEY", "rl doctor x.yaml", "rl doctor", "rl env run -h")
    assert unknown_commands(" ".join(f"`{each}`" for each in commands)) == []
