"""Every dataset of the hub whose columns are known, from a file in its exact format: by its name alone from a download
of the hub's library, and from a local file with a processor or a mapping of the user's."""

import csv
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.rows.example import by_keys
from rl_algos.data.rows.preference import preference
from rl_algos.data.sources.hub_datasets import DATASETS, PREFERENCES
from rl_core.errors import DataError


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Case:
    """A dataset with some of its rows.

    Args:
        file: in the repository; a pattern of the card's is made of it.
        split, subset: as the card has them.
        rows: with the columns of the card, and their nesting.
        asked, answer, solution: of the first example.
        responses: of preferences: texts, the best first.
        purpose: for which the split is read.
    """

    file: str
    rows: list[dict[str, Any]]
    asked: str
    answer: Any = None
    solution: str | None = None
    split: str = "train"
    subset: str = "default"
    responses: list[str] = field(default_factory=list)
    purpose: str = "train"


def problem_card(**other):
    return {"problem": "1+1?", "solution": "It is \\boxed{2}.", "answer": "2", **other}


NUMINA = {
    "problem_type": "Algebra",
    "question_type": "math-word-problem",
    "source": "olympiads",
    "problem_is_valid": "Yes",
    "solution_is_valid": "Yes",
    "synthetic": False,
}
DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n1+1?\n\nRemember to put your answer on "
    'its own line after "Answer:".'
)


def message(number, parent, role, text, rank=None):
    """A row of OpenAssistant's."""
    return {
        "message_id": f"m{number}",
        "parent_id": parent,
        "user_id": "u",
        "created_date": "2023-02-05T14:23:50.983374+00:00",
        "text": text,
        "role": role,
        "lang": "en",
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "rank": rank,
        "synthetic": False,
        "model_name": None,
        "detoxify": {"toxicity": 0.1, "severe_toxicity": 0.0},
        "message_tree_id": "m0",
        "tree_state": "ready_for_export",
        "emojis": {"name": ["+1"], "count": [1]},
        "labels": {"name": ["spam"], "value": [0.0], "count": [3]},
    }


TREE = [
    message(0, None, "prompter", "Hi"),
    message(1, "m0", "assistant", "worse", 1),
    message(2, "m0", "assistant", "better", 0),
    message(3, "m2", "prompter", "And?"),
    message(4, "m3", "assistant", "More"),
    message(5, "m99", "assistant", "an orphan", 0),
]

ANSWERED = {
    "nvidia/OpenMathInstruct-2": Case(
        "data/train-00000-of-00032.parquet",
        [
            {
                "problem": "1+1?",
                "generated_solution": "So 2.",
                "expected_answer": "2",
                "problem_source": "augmented_math",
            }
        ],
        "1+1?",
        "2",
        "So 2.",
    ),
    "AI-MO/NuminaMath-CoT": Case(
        "data/train-00000-of-00005.parquet",
        [
            {
                "source": "synthetic_math",
                "problem": "1+1?",
                "solution": "It is $\\boxed{\\frac{4}{2}}$.",
                "messages": [user("1+1?"), assistant("It is $\\boxed{\\frac{4}{2}}$.")],
            }
        ],
        "1+1?",
        "\\frac{4}{2}",
        "It is $\\boxed{\\frac{4}{2}}$.",
    ),
    "AI-MO/NuminaMath-1.5": Case(
        "data/train-00000-of-00003.parquet", [problem_card(**NUMINA)], "1+1?", "2", "It is \\boxed{2}."
    ),
    "open-r1/OpenR1-Math-220k": Case(
        "data/train-00000-of-00010.parquet",
        [
            problem_card(
                problem_type="Algebra",
                question_type="math-word-problem",
                source="olympiads",
                uuid="a",
                is_reasoning_complete=[True, True],
                generations=["<think>3</think> 3", "<think>2</think> 2"],
                correctness_math_verify=[False, True],
                correctness_llama=[True, True],
                finish_reasons=["stop", "stop"],
                correctness_count=1,
                messages=[user("1+1?"), assistant("<think>2</think> 2")],
            )
        ],
        "1+1?",
        "2",
        "<think>2</think> 2",
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": Case(
        "deepscaler.json", [{"problem": "1+1?", "answer": "2", "solution": ""}], "1+1?", "2"
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": Case(
        "data/dapo-math-17k.parquet",
        [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": DAPO_TEXT, "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
            }
        ],
        DAPO_TEXT,
        "2",
    ),
    "openai/gsm8k": Case(
        "main/train-00000-of-00001.parquet",
        [{"question": "Natalia?", "answer": "She sold <<48/2=24>>1,024.\n#### 1,024"}],
        "Natalia?",
        "1024",
        "She sold <<48/2=24>>1,024.\n#### 1,024",
        subset="main",
    ),
    "HuggingFaceH4/MATH-500": Case(
        "test.jsonl",
        [problem_card(subject="Precalculus", level=2, unique_id="test/precalculus/807.json")],
        "1+1?",
        "2",
        "It is \\boxed{2}.",
        split="test",
        purpose="validation",
    ),
    "HuggingFaceH4/aime_2024": Case(
        "data/train-00000-of-00001.parquet",
        [{**problem_card(id=60, url="https://artofproblemsolving.com", year="2024"), "answer": "204"}],
        "1+1?",
        "204",
        "It is \\boxed{2}.",
        purpose="validation",
    ),
    "Maxwell-Jia/AIME_2024": Case(
        "aime_2024_problems.parquet",
        [{"ID": "2024-II-4", "Problem": "1+1?", "Solution": "Two.", "Answer": 33}],
        "1+1?",
        "33",
        "Two.",
        purpose="validation",
    ),
    "di-zhang-fdu/AIME_1983_2024": Case(
        "AIME_Dataset_1983_2024.csv",
        [{"ID": "1983-1", "Year": 1983, "Problem Number": 1, "Question": "1+1?", "Answer": "60", "Part": None}],
        "1+1?",
        "60",
        purpose="validation",
    ),
    "evalplus/humanevalplus": Case(
        "data/test-00000-of-00001-5973903632b82d40.parquet",
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "def f(a):\n",
                "canonical_solution": "    return a",
                "entry_point": "f",
                "test": "def check(c):\n    assert c(2) == 2",
            }
        ],
        "Complete this Python code:\n```python\ndef f(a):\n```",
        split="test",
        purpose="validation",
    ),
    "evalplus/mbppplus": Case(
        "data/test-00000-of-00001-d5781c9c51e02795.parquet",
        [
            {
                "task_id": 2,
                "code": "def f(a): ...",
                "prompt": "Twice.",
                "source_file": "a",
                "test_imports": ["import math"],
                "test_list": ["assert f(2) == 4"],
                "test": "assert f(3) == 6",
            }
        ],
        "Twice.\nYour code should pass these tests:\nassert f(2) == 4",
        split="test",
        purpose="validation",
    ),
    "google/IFEval": Case(
        "ifeval_input_data.jsonl",
        [
            {
                "key": 1000,
                "prompt": "Write without commas.",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{"num_words": None}],
            }
        ],
        "Write without commas.",
        purpose="validation",
    ),
    "math-ai/aime25": Case(
        "test.jsonl", [{"problem": "1+1?", "answer": "70", "id": "0"}], "1+1?", "70", split="test", purpose="validation"
    ),
    "yentinglin/aime_2025": Case(
        "data/train-00000-of-00001.parquet",
        [{"id": "0", "problem": "1+1?", "answer": "70", "solution": "7.", "url": "a", "year": 2025}],
        "1+1?",
        "70",
        "7.",
        purpose="validation",
    ),
    "opencompass/AIME2025": Case(
        "aime2025-I.jsonl",
        [{"question": "1+1?", "answer": "70"}],
        "1+1?",
        "70",
        split="test",
        subset="AIME2025-I",
        purpose="validation",
    ),
    "Idavidrein/gpqa": Case(
        "gpqa_diamond.csv",
        [
            {
                "Pre-Revision Question": "?",
                "Pre-Revision Correct Answer": "this one",
                "Pre-Revision Incorrect Answer 1": "that one",
                "Pre-Revision Incorrect Answer 2": "those two",
                "Pre-Revision Incorrect Answer 3": "no one",
                "Pre-Revision Explanation": "So.",
                "Self-reported question-writing time (minutes)": 20.0,
                "Question": "Which, then,\nis it?",
                "Correct Answer": "this",
                "Incorrect Answer 1": "that",
                "Incorrect Answer 2": "those",
                "Incorrect Answer 3": "none",
                "Explanation": "Because.",
                "Revision Comments (from Question Writer)": "",
                "Subdomain": "Physics",
                "Writer's Difficulty Estimate": "Hard graduate level",
                "Extra Revised Question": "",
                "Extra Revised Explanation": "",
                "Extra Revised Correct Answer": "",
                "Extra Revised Incorrect Answer 1": "",
                "Extra Revised Incorrect Answer 2": "",
                "Extra Revised Incorrect Answer 3": "",
                "Non-Expert Validator Accuracy": 0.0,
                "Majority Non-Expert Vals Incorrect": 1.0,
                "Expert Validator Accuracy": 1.0,
                "Record ID": "rec0",
            }
        ],
        "Which, then,\nis it?",
        "by its text: this",
        subset="gpqa_diamond",
        purpose="validation",
    ),
    "cais/mmlu": Case(
        "all/auxiliary_train-00000-of-00001.parquet",
        [{"question": "Which?", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": 2}],
        "Which?\n\nA) a\nB) b\nC) c\nD) d\n\nEnd with the letter",
        "C",
        split="auxiliary_train",
        subset="all",
    ),
    "TIGER-Lab/MMLU-Pro": Case(
        "data/test-00000-of-00001.parquet",
        [
            {
                "question_id": 70,
                "question": "Which?",
                "options": [f"option {number}" for number in range(10)],
                "answer": "I",
                "answer_index": 8,
                "cot_content": "",
                "category": "business",
                "src": "ori_mmlu-business_ethics",
            }
        ],
        "Which?\n\nA) option 0\n",
        "I",
        split="test",
        purpose="validation",
    ),
    "rajpurkar/squad": Case(
        "plain_text/train-00000-of-00001.parquet",
        [
            {
                "id": "5733be284776f41900661182",
                "title": "Ada",
                "context": "Ada wrote it.",
                "question": "Who?",
                "answers": {"text": ["Ada", "ada"], "answer_start": [0, 0]},
            }
        ],
        "Context: Ada wrote it.\n\nQuestion: Who?",
        "Ada",
        subset="plain_text",
    ),
    "OpenAssistant/oasst1": Case("data/train-00000-of-00001-b42a775f407cee45.parquet", TREE, "Hi"),
    "OpenAssistant/oasst2": Case("data/train-00000-of-00001.parquet", TREE, "Hi"),
    "allenai/tulu-3-sft-mixture": Case(
        "data/train-00000-of-00006.parquet",
        [
            {
                "id": "oasst1_4883",
                "messages": [user("Hi"), assistant("Hello")],
                "source": "ai2-adapt-dev/oasst1_converted",
            }
        ],
        "Hi",
    ),
    "HuggingFaceH4/ultrafeedback_binarized": Case(
        "data/train_sft-00000-of-00001.parquet",
        [
            {
                "prompt": "Hi",
                "prompt_id": "0",
                "chosen": [user("Hi"), assistant("better")],
                "rejected": [user("Hi"), assistant("worse")],
                "messages": [user("Hi"), assistant("better")],
                "score_chosen": 8.5,
                "score_rejected": 6.0,
            }
        ],
        "Hi",
        split="train_sft",
    ),
}

TULU_PAIR = {
    "id": "a",
    "prompt": "Hi",
    "chosen": [user("Hi"), assistant("better")],
    "rejected": [user("Hi"), assistant("worse")],
    "source": "ai2-adapt-dev/ultrafeedback_cleaned",
}


def judged(response, score):
    """One of UltraFeedback's completions."""
    return {
        "annotations": {"helpfulness": {"Rating": "4", "Rationale": "Good."}},
        "custom_system_prompt": "Be helpful.",
        "model": "alpaca-7b",
        "principle": "helpfulness",
        "response": response,
        "critique": "Well.",
        "fine-grained_score": 4.25,
        "overall_score": score,
    }


PREFERRED = {
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": Case(
        "data/train-00000-of-00002.parquet", [TULU_PAIR], "Hi", responses=["better", "worse"]
    ),
    "allenai/llama-3.1-tulu-3-70b-preference-mixture": Case(
        "data/train-00000-of-00003.parquet", [TULU_PAIR], "Hi", responses=["better", "worse"]
    ),
    "nvidia/HelpSteer3": Case(
        "preference/train.jsonl.gz",
        [
            {
                "domain": "general",
                "language": "english",
                "context": [user("Hi")],
                "response1": "worse",
                "response2": "better",
                "overall_preference": 2,
                "individual_preference": [{"score": 2, "reasoning": "2 is better", "feedback1": "-", "feedback2": "+"}],
            }
        ],
        "Hi",
        subset="preference",
        responses=["better", "worse"],
    ),
    "HuggingFaceH4/ultrafeedback_binarized": Case(
        "data/train_prefs-00000-of-00001.parquet",
        ANSWERED["HuggingFaceH4/ultrafeedback_binarized"].rows,
        "Hi",
        split="train_prefs",
        responses=["better", "worse"],
    ),
    "openbmb/UltraFeedback": Case(
        "flan.jsonl",
        [
            {
                "source": "flan_v2_cot",
                "instruction": "Hi",
                "models": ["alpaca-7b", "gpt-4"],
                "completions": [judged("worse", 5.0), judged("better", 8.5)],
                "correct_answers": ["None"],
                "incorrect_answers": ["None"],
            }
        ],
        "Hi",
        responses=["better", "worse"],
    ),
    "Anthropic/hh-rlhf": Case(
        "harmless-base/train.jsonl.gz",
        [
            {
                "chosen": "\n\nHuman: Hello\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: better",
                "rejected": "\n\nHuman: Hello\n\nAssistant: Yes?\n\nHuman: Hi\n\nAssistant: worse",
            }
        ],
        "Hello",
        responses=["better", "worse"],
    ),
    "trl-lib/kto-mix-14k": Case(
        "data/train-00000-of-00001.parquet",
        [
            {"prompt": [user("Hi")], "completion": [assistant("better")], "label": True},
            {"prompt": [user("Hi")], "completion": [assistant("worse")], "label": False},
        ],
        "Hi",
        responses=["better"],
    ),
    "OpenAssistant/oasst1": Case(
        "data/train-00000-of-00001-b42a775f407cee45.parquet", TREE, "Hi", responses=["better", "worse"]
    ),
    "OpenAssistant/oasst2": Case("data/train-00000-of-00001.parquet", TREE, "Hi", responses=["better", "worse"]),
}

CASES = [pytest.param(name, case, by_keys, id=name) for name, case in ANSWERED.items()] + [
    pytest.param(name, case, preference, id=f"{name} (preferences)") for name, case in PREFERRED.items()
]


def write(path: Path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    match path.suffix:
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text(text)
        case ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
    return path


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The cache of the hub's library on a machine without a network."""
    import datasets

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def download(downloads, name, case):
    """A download of a dataset as `hf download` lays it out, with the part of its card that names the files."""
    folder = downloads / f"datasets--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    write(snapshot / case.file, case.rows)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    files = f"- config_name: {case.subset}\n  data_files:\n  - split: {case.split}\n    path: {case.file}"
    (snapshot / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n# A card\n")


def first_of(data, purpose, default):
    [dataset] = load_datasets(DataConfig.model_validate(data), purpose, default)
    return next(iter(dataset.examples.values())), dataset


def check(example, case):
    assert example.messages[0]["content"].startswith(case.asked)
    if case.answer is not None and case.answer.startswith("by its text: "):
        assert f"{example.answer}) {case.answer.removeprefix('by its text: ')}\n" in example.messages[0]["content"]
    else:
        assert example.answer == case.answer
    assert example.solution == case.solution
    said = [response for response in example.responses if response.is_desirable is not False]
    best_first = sorted(said, key=lambda each: (each.rank or 0, -(each.score or 0)))
    assert [response.messages[0]["content"] for response in best_first] == case.responses


@pytest.mark.parametrize(("name", "case", "default"), CASES)
def test_the_name_alone_is_enough(downloads, name, case, default):
    download(downloads, name, case)
    data = {"train": {"dataset_name": name}, "validation": {"dataset_name": name}}
    example, dataset = first_of(data, case.purpose, default)
    check(example, case)
    known = DATASETS.get(name) if default is by_keys else None
    if known and known.environment:
        assert dataset.environments() == {known.environment: f"{name}:{case.purpose}:0"}


@pytest.mark.parametrize(("name", "case", "default"), CASES)
def test_the_file_itself_loads_with_the_processor(tmp_path, name, case, default):
    known = (PREFERENCES if default is preference else DATASETS)[name]
    path = write(tmp_path / Path(case.file).name, case.rows)
    settings = {"data_path": str(path), "processor": known.processor, "columns": dict(known.columns)}
    check(first_of({"train": settings}, "train", default)[0], case)


@pytest.mark.parametrize("name", [name for name, known in DATASETS.items() if known.processor == "math_problem"])
def test_keys_of_the_user_win_over_what_is_known(downloads, name):
    case = ANSWERED[name]
    names = {
        "problem": "asked",
        "question": "asked",
        "Problem": "asked",
        "Question": "asked",
        "answer": "said",
        "Answer": "said",
    }
    rows = [{names.get(key, key): value for key, value in row.items()} for row in case.rows]
    download(downloads, name, Case(case.file, rows, "", split=case.split, subset=case.subset))
    mapping = {"dataset_name": name, "columns": {"problem": "asked", "answer": "said"}, "env_name": "reward.py:score"}
    example, dataset = first_of({"train": mapping, "validation": mapping}, case.purpose, by_keys)
    assert (example.messages[0]["content"], example.answer) == (case.asked, case.answer)
    assert list(dataset.environments()) == ["reward.py:score"]
    keys = {"dataset_name": name, "input_key": "asked", "output_key": "said"}
    example, _ = first_of({"train": keys, "validation": keys}, case.purpose, by_keys)
    assert (example.messages[0]["content"], str(example.answer), example.solution) == (case.asked, case.answer, None)


OF_IMAGES = {
    "HuggingFaceH4/llava-instruct-mix-vsft",
    "hiyouga/geometry3k",
    "leonardPKU/clevr_cogen_a_train",
    "lmms-lab/RefCOCO",
}
"""Their rows are read in `test_row_images`, and in the tests of the recipes."""


def test_every_known_dataset_has_a_case():
    assert set(ANSWERED) == set(DATASETS) - OF_IMAGES
    assert set(PREFERRED) == set(PREFERENCES)


def test_a_split_that_a_download_does_not_have_is_told(downloads):
    download(downloads, "openai/gsm8k", ANSWERED["openai/gsm8k"])
    with pytest.raises(DataError, match=r"'openai/gsm8k' \(split 'test'\) cannot be loaded"):
        first_of({"train": {"dataset_name": "openai/gsm8k", "split": "test"}}, "train", by_keys)


def test_a_tree_gives_its_best_conversation_and_its_ranked_replies(tmp_path):
    path = write(tmp_path / "a.parquet", TREE)
    example, dataset = first_of({"train": {"data_path": str(path), "processor": "oasst"}}, "train", by_keys)
    assert [each["content"] for each in example.messages] == ["Hi", "better", "And?", "More"]
    assert [each["role"] for each in example.messages] == ["user", "assistant"] * 2
    assert len(dataset.examples) == 1

    def nested(number):
        children = [index for index, row in enumerate(TREE) if row["parent_id"] == f"m{number}"]
        return {**TREE[number], "replies": [nested(child) for child in children]}

    tree = {"message_tree_id": "m0", "tree_state": "ready_for_export", "prompt": nested(0)}
    path = write(tmp_path / "a.trees.jsonl.gz", [tree])
    again, _ = first_of({"train": {"data_path": str(path), "processor": "oasst"}}, "train", by_keys)
    assert again.messages == example.messages
    ranked, _ = first_of({"train": {"data_path": str(path), "processor": "oasst_preference"}}, "train", preference)
    assert [each.messages[0]["content"] for each in ranked.responses] == ["better", "worse"]


def test_proofs_have_no_answer(tmp_path):
    rows = [problem_card(**NUMINA), {**problem_card(**NUMINA), "answer": "proof"}]
    path = write(tmp_path / "a.jsonl", rows)
    _, dataset = first_of({"train": {"data_path": str(path), "processor": "math_problem"}}, "train", by_keys)
    assert [example.answer for example in dataset.examples.values()] == ["2", None]
    assert list(dataset.answered().examples) == ["a.jsonl:train:0"]
    write(path, rows[1:])
    _, dataset = first_of({"train": {"data_path": str(path), "processor": "math_problem"}}, "train", by_keys)
    with pytest.raises(DataError, match="1 of 1 rows have a solution, but no answer"):
        dataset.answered()


def test_a_problem_with_neither_an_answer_nor_a_solution_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"problem": "1+1?", "answer": "notfound", "solution": ""}])
    with pytest.raises(DataError, match="line 1: the problem has neither an answer that can be compared nor a sol"):
        first_of({"train": {"data_path": str(path), "processor": "math_problem"}}, "train", by_keys)


def test_options_are_shuffled_by_their_texts_alone(tmp_path):
    rows = [{**ANSWERED["Idavidrein/gpqa"].rows[0], "Question": f"Question {index}?"} for index in range(40)]
    path = write(tmp_path / "a.csv", rows)
    answers = []
    for _ in range(2):
        _, dataset = first_of({"train": {"data_path": str(path), "processor": "gpqa"}}, "train", by_keys)
        answers.append([example.answer for example in dataset.examples.values()])
    assert answers[0] == answers[1]
    assert set(answers[0]) == set("ABCD")
    for example in dataset.examples.values():
        assert f"\n{example.answer}) this\n" in example.messages[0]["content"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"answer": 4}, "a letter from A to D or a number from 0, got 4"),
        ({"answer": "E"}, "a letter from A to D"),
        ({"answer": None}, "a letter from A to D"),
        ({"choices": ["a"]}, "the options must be a list"),
        ({"question": 3}, "'question' must be a string"),
    ],
)
def test_a_malformed_question_is_refused(tmp_path, changed, says):
    path = write(tmp_path / "a.jsonl", [{**ANSWERED["cais/mmlu"].rows[0], **changed}])
    with pytest.raises(DataError, match=f"line 1: .*{says}"):
        first_of({"train": {"data_path": str(path), "processor": "multiple_choice"}}, "train", by_keys)
