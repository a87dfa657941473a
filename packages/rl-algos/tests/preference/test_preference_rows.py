import json
import logging

import numpy as np
import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.rows.preference import preference
from rl_algos.dpo.algorithm import ReferenceLogprobs
from rl_algos.preference.data import judged_rows, pair_rows
from rl_algos.preference.rows import judged_batch, pair_batch
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError
from rl_core.images import DIGEST_BYTES, IMAGES
from rl_core.model import LOGPROBS
from rl_core.testing.fakes import FakeModel

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "31"}


def dataset(tmp_path, rows, **settings):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig.model_validate({"train": {"data_path": str(path), **settings}})
    return load_datasets(data, "train", preference)[0], data


def pairs(tmp_path, tokenizer, rows, *, pairing="best-worst", needs_margin=False, limit=64, **settings):
    found, data = dataset(tmp_path, rows, **settings)
    return pair_rows(found, data, tokenizer, limit, pairing=pairing, needs_margin=needs_margin)


def said(tokenizer, response):
    return tokenizer.decode(response.tokens[response.loss_mask == 1])


def test_rows_become_pairs_of_tokens(tmp_path, tokenizer):
    [row] = pairs(tmp_path, tokenizer, [{**PAIR, "margin": 2.0}])
    assert (row.id, row.margin) == ("a.jsonl:train:0", 2.0)
    assert (said(tokenizer, row.chosen), said(tokenizer, row.rejected)) == ("2<|end|>", "31<|end|>")


def test_columns_of_other_names_are_mapped(tmp_path, tokenizer):
    rows = [{"question": "1+1=", "better": "2", "worse": "31"}]
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    [row] = pairs(tmp_path, tokenizer, rows, columns=columns)
    assert (said(tokenizer, row.chosen), said(tokenizer, row.rejected)) == ("2<|end|>", "31<|end|>")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: no column 'bettr'; did you mean better\?"):
        pairs(tmp_path, tokenizer, rows, columns={**columns, "chosen": "bettr"})


def test_pairs_of_marked_turns_are_named_by_file_and_line_if_they_cannot_be_used(tmp_path, tokenizer):
    asked = "\n\nHuman: 1+1=\n\nAssistant:"
    rows = [{"chosen": f"{asked} 2", "rejected": f"{asked} 31"}, {"chosen": f"{asked} 2", "rejected": f"{asked} 2"}]
    [row] = pairs(tmp_path, tokenizer, rows)
    assert (said(tokenizer, row.chosen), said(tokenizer, row.rejected)) == ("2<|end|>", "31<|end|>")
    [row] = pairs(tmp_path, tokenizer, [{"chosen": f"{asked} 2", "rejected": asked}])
    assert said(tokenizer, row.rejected) == "<|end|>"
    other = "\n\nHuman: 1+2=\n\nAssistant: 3"
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: .*must answer the same conversation"):
        pairs(tmp_path, tokenizer, [rows[0], {"chosen": f"{asked} 2", "rejected": other}])


TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
WORSE = [TALK[0], {"role": "assistant", "content": "31"}]
HUB_ROWS = {
    "nvidia/HelpSteer3, preference": (
        "helpsteer3",
        {
            "domain": "stem",
            "language": "english",
            "context": TALK[:1],
            "response1": "31",
            "response2": "2",
            "overall_preference": 3,
            "individual_preference": [{"score": 3, "reasoning": "r", "feedback1": "f", "feedback2": "g"}],
        },
        3.0,
    ),
    "openbmb/UltraFeedback": (
        "ultrafeedback",
        {
            "source": "s",
            "instruction": "1+1=",
            "models": ["m", "n"],
            "completions": [
                {"model": "m", "response": "31", "overall_score": 2.0, "critique": "c"},
                {"model": "n", "response": "2", "overall_score": 8.5, "critique": "c"},
            ],
            "correct_answers": [],
        },
        6.5,
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        None,
        {
            "prompt": "1+1=",
            "prompt_id": "a",
            "chosen": TALK,
            "rejected": WORSE,
            "messages": TALK,
            "score_chosen": 8.0,
            "score_rejected": 5.0,
        },
        3.0,
    ),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        "preference",
        {"id": "a", "prompt": "1+1=", "chosen": TALK, "rejected": WORSE, "source": "s"},
        None,
    ),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_rows_as_the_hub_has_them_are_read(tmp_path, tokenizer, name):
    processor, row, margin = HUB_ROWS[name]
    [pair] = pairs(tmp_path, tokenizer, [row], processor=processor)
    assert (said(tokenizer, pair.chosen), said(tokenizer, pair.rejected)) == ("2<|end|>", "31<|end|>")
    assert pair.margin == margin


def test_prompts_get_the_texts_of_the_dataset(tmp_path, tokenizer):
    (tmp_path / "prompt.txt").write_text("Sum: {input}")
    [row] = pairs(tmp_path, tokenizer, [PAIR], prompt_file=str(tmp_path / "prompt.txt"))
    assert "Sum: 1+1=" in tokenizer.decode(row.rejected.tokens)


def test_several_completions_give_several_pairs_with_ids_of_their_own(tmp_path, tokenizer):
    completions = [{"completion": text, "rank": rank} for rank, text in enumerate("234")]
    rows = pairs(tmp_path, tokenizer, [{"prompt": "1+1=", "completions": completions}], pairing="all")
    assert [row.id for row in rows] == [f"a.jsonl:train:0/{number}" for number in range(3)]


def test_rows_without_a_preference_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    tie = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    with caplog.at_level(logging.WARNING):
        rows = pairs(tmp_path, tokenizer, [PAIR, tie, PAIR])
    assert [row.id for row in rows] == ["a.jsonl:train:0", "a.jsonl:train:2"]
    assert "1 of 3 rows are excluded" in caplog.text
    with pytest.raises(DataError, match=r"'a\.jsonl' has no pairs"):
        pairs(tmp_path, tokenizer, [tie])


def test_a_pair_is_too_long_if_one_response_is(tmp_path, tokenizer):
    long = {**PAIR, "rejected": "3" * 90}
    with pytest.raises(DataError, match=r"1 of 2 rows have more than 64 tokens; the longest \(.*line 2\)"):
        pairs(tmp_path, tokenizer, [PAIR, long])
    assert len(pairs(tmp_path, tokenizer, [PAIR, long], limit=200)) == 2


def test_a_margin_that_is_needed_and_missing_is_named_with_its_line(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the pair has no margin"):
        pairs(tmp_path, tokenizer, [{**PAIR, "margin": 1}, PAIR], needs_margin=True)


def test_judged_rows_have_labels_or_scores(tmp_path, tokenizer):
    found, data = dataset(tmp_path, [{"prompt": "1+1=", "completion": "2", "label": True}, PAIR])
    rows = judged_rows(found, data, tokenizer, 64, by="label")
    assert [(row.id.partition(":")[2], said(tokenizer, row.response), row.verdict) for row in rows] == [
        ("train:0", "2<|end|>", 1.0),
        ("train:1/0", "2<|end|>", 1.0),
        ("train:1/1", "31<|end|>", 0.0),
    ]
    with pytest.raises(DataError, match=r"line 1: a response has no `score`"):
        judged_rows(found, data, tokenizer, 64, by="score")
    assert judged_batch(rows).array("verdict").tolist() == [1.0, 1.0, 0.0]


def test_a_batch_of_pairs_has_the_chosen_row_first(tmp_path, tokenizer):
    rows = pairs(tmp_path, tokenizer, [{**PAIR, "margin": 2.0}, PAIR])
    batch = pair_batch(rows)
    assert batch.array("pair").tolist() == [0, 0, 1, 1]
    assert batch.array("is_chosen").tolist() == [1, 0, 1, 0]
    assert batch.array("margin").tolist() == [2.0, 2.0, 0.0, 0.0]
    np.testing.assert_array_equal(batch.ragged("tokens")[3], rows[1].rejected.tokens)
    np.testing.assert_array_equal(batch.ragged("loss_mask")[2], rows[1].chosen.loss_mask)


@pytest.mark.parametrize("cached", [False, True])
def test_the_reference_is_read_once_for_each_row_if_it_is_kept(tmp_path, tokenizer, cached):
    rows = pairs(tmp_path, tokenizer, [{**PAIR, "chosen": str(number)} for number in range(5)])
    policy, reference = FakeModel(), ReferenceLogprobs(cached=cached)
    first, second = pair_batch(rows[:3]), pair_batch(rows[1:])
    for batch in (first, second, first):
        found = reference(batch, policy).ragged("ref_logprobs")
        expected = FakeModel().infer(batch, [LOGPROBS], reference=True).ragged("logprobs")
        np.testing.assert_array_equal(found.values, expected.values)
    assert [len(batch) for _, batch in policy.calls] == ([6, 4] if cached else [6, 8, 6])


def test_the_reference_sees_the_images_of_rows(tmp_path, tokenizer):
    batch = pair_batch(pairs(tmp_path, tokenizer, [PAIR]))
    images = Ragged.from_rows([np.full((1, DIGEST_BYTES), row, np.uint8) for row in (1, 2)], np.uint8, (DIGEST_BYTES,))
    policy = FakeModel()
    ReferenceLogprobs(cached=False)(batch.with_columns({IMAGES: images}), policy)
    ((_, read),) = policy.calls
    assert set(read) == {"tokens", IMAGES}
    np.testing.assert_array_equal(read.ragged(IMAGES).values, images.values)
