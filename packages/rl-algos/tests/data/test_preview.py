"""Rows as algorithms read them, shown one by one, are what runs train on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from jinja2 import TemplateError

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.examples import load_datasets, open_datasets
from rl_algos.data.preview import Refusal, RowReader, Text, UnusedRow, spans
from rl_algos.data.rows.example import Example
from rl_algos.grpo.config import GRPOConfig
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.sft.data import conversation_reader, training_rows
from rl_algos.tiny_model import make_tokenizer
from rl_core.config import Config
from rl_core.environments.config import EnvironmentConfig
from rl_core.errors import DataError
from rl_core.model_config import ModelConfig

SETTINGS = DatasetConfig(data_path="rows.jsonl")
ROWS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8, 12)
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return DataConfig(train={"data_path": str(path)})


def test_a_shown_row_has_the_tokens_and_the_mask_that_are_trained_on(data, tokenizer):
    reader = conversation_reader(data, ModelConfig(model_name="m"), "all")
    [opened], [loaded] = open_datasets(data, "train"), load_datasets(data, "train")
    trained = training_rows(loaded, data, tokenizer, reader.limit, learn="all")
    for number, row in zip(opened.numbers, trained, strict=True):
        [text] = reader.texts(tokenizer, opened.convert(opened.rows[number]), opened.settings)
        assert text.tokens.tolist() == row.tokens.tolist()
        assert text.learned.tolist() == row.loss_mask.tolist()


def test_rows_that_are_held_out_are_opened_for_the_other_purpose(data):
    held_out = data.model_copy(update={"train": data.train.model_copy(update={"split_validation_size": 1})})
    train, validation = ({*next(open_datasets(held_out, purpose)).numbers} for purpose in ("train", "validation"))
    assert len(validation) == 1
    assert train | validation == set(range(len(ROWS)))
    assert not train & validation


def test_spans_join_to_the_text_with_its_special_tokens(tokenizer):
    text = "<|user|>a b<|end|><|assistant|>c d<|end|>"
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    learned = np.zeros(len(tokens), dtype=np.uint8)
    learned[-4:] = 1
    found = list(spans(tokenizer, Text("", tokens, learned)))
    assert found == [("<|user|>a b<|end|><|assistant|>", False), ("c d<|end|>", True)]


def test_a_space_before_a_span_stays_with_decoders_that_strip_it():
    class Stripping:
        def decode(self, tokens, **_options):
            return "".join((" a", " b", " c")[token] for token in tokens).lstrip()

    text = Text("", np.array([0, 1, 2]), np.array([0, 1, 0], dtype=np.uint8))
    assert list(spans(Stripping(), text)) == [("a", False), (" b", True), (" c", False)]


def raising(error):
    def encode(*_arguments):
        raise error

    return RowReader(encode, 8, "a key")


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (DataError("wrong"), Refusal("wrong")),
        (UnusedRow("a tie"), Refusal("a tie", is_fault=False)),
        (TemplateError("no tools"), Refusal("the chat template refuses it: no tools")),
    ],
)
def test_a_row_that_cannot_be_encoded_is_refused_with_the_reason(error, refusal):
    assert raising(error).texts(None, Example(()), SETTINGS) == refusal


class Environments(Config):
    math: EnvironmentConfig = EnvironmentConfig()


@pytest.fixture
def prompts(data):
    policy = SimpleNamespace(max_total_sequence_length=32, generation=SimpleNamespace(max_new_tokens=8))
    config = SimpleNamespace(env=Environments(), data=data, policy=policy, grpo=GRPOConfig())
    return RolloutAlgorithm().row_reader(config)


def test_prompts_leave_room_for_a_completion(prompts):
    assert (prompts.limit, prompts.limit_key) == (
        24,
        "policy.max_total_sequence_length less policy.generation.max_new_tokens",
    )


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (Example(()), "the row names no environment to score it"),
        (Example((), environment="maths"), "no environment 'maths' is installed; did you mean math"),
        (Example((), environment="math", solution="a proof"), "no answer that can be compared"),
    ],
)
def test_prompts_that_nothing_scores_are_refused(prompts, example, reason):
    assert reason in prompts.refusal(example, SETTINGS).reason
