"""The recipes of supervised fine-tuning read data in the format of the datasets that they name."""

import pyarrow
import pyarrow.parquet
import pytest

from rl_algos.data.examples import load_examples
from rl_algos.sft.data import prepare_examples
from rl_algos.tiny_model import make_tokenizer
from rl_launch.run_config.reading import read_plan

OPEN_MATH = [
    {
        "problem": f"What is {number}+1?",
        "generated_solution": f"Adding 1 to {number} gives \\boxed{{{number + 1}}}.",
        "expected_answer": str(number + 1),
        "problem_source": "augmented_math",
    }
    for number in range(3)
]
ULTRA_CHAT = [
    {
        "prompt": "Say hi.",
        "prompt_id": "0" * 64,
        "messages": [
            {"content": "Say hi.", "role": "user"},
            {"content": "Hi!", "role": "assistant"},
            {"content": "Again.", "role": "user"},
            {"content": "Hi again!", "role": "assistant"},
        ],
    }
]


@pytest.mark.parametrize(
    ("recipe", "file", "rows", "learned"),
    [
        (
            "sft-openmathinstruct2",
            "train_1M-00000-of-00001.parquet",
            OPEN_MATH,
            [f"{row['generated_solution']}<|end|>" for row in OPEN_MATH],
        ),
        ("sft-lora", "train_sft-00000-of-00001.parquet", ULTRA_CHAT, ["Hi!<|end|>Hi again!<|end|>"]),
    ],
)
def test_a_recipe_learns_from_a_file_in_its_datasets_format(tmp_path, recipe, file, rows, learned):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / file)
    overrides = [f"data.{part}={{data_path: {tmp_path / file}}}" for part in ("train", "validation")]
    config = read_plan(recipe, [*overrides, "data.num_workers=0"]).config
    tokenizer = make_tokenizer()
    data = prepare_examples(config, tokenizer, load_examples(config))
    taken = data.train.take(len(rows))
    assert sorted(tokenizer.decode(row.tokens[row.loss_mask == 1]) for row in taken) == sorted(learned)
    assert [len(batch) for batch in data.validation[file]] == [len(rows)]


def test_recipes_with_adapters_train_adapters():
    for recipe, overrides in (("sft-lora", []), ("sft-lora-tiny", ["cluster.device=cpu"])):
        assert read_plan(recipe, overrides).config.policy.lora_cfg.enabled
