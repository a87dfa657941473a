"""Datasets of the hub whose columns are known, so that their name is enough.

Names, subsets, splits and columns are those of their cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_algos.data.config import DatasetConfig, Purpose


@dataclass(frozen=True)
class HubDataset:
    """Settings of a dataset, for those that the user does not give.

    Args:
        doc: One line.
        processor: Processor of its rows; None for rows that have `messages`.
        columns: See `DatasetConfig.columns`.
        subset: Configuration that is read.
        splits: Splits by purpose; the purpose itself if there is none for it.
        environment: Scores completions; empty if none of the installed ones can.
    """

    doc: str
    processor: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    splits: Mapping[Purpose, str] = field(default_factory=dict)
    environment: str = ""


_ONLY_TEST: Mapping[Purpose, str] = {"train": "test", "validation": "test"}
_ONLY_TRAIN: Mapping[Purpose, str] = {"train": "train", "validation": "train"}
_TESTED: Mapping[Purpose, str] = {"validation": "test"}

_MATH = "math"

DATASETS: Mapping[str, HubDataset] = {
    "nvidia/OpenMathInstruct-2": HubDataset(
        "problems of GSM8K and MATH and new ones, with solutions by a model", "openmathinstruct2", environment=_MATH
    ),
    "AI-MO/NuminaMath-CoT": HubDataset(
        "competition problems with worked solutions", "numina_cot", splits=_TESTED, environment=_MATH
    ),
    "AI-MO/NuminaMath-1.5": HubDataset(
        "competition problems with solutions, most with an answer", "math_problem", environment=_MATH
    ),
    "open-r1/OpenR1-Math-220k": HubDataset(
        "problems of NuminaMath 1.5 with reasoning by DeepSeek R1", "openr1_math", environment=_MATH
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": HubDataset(
        "competition problems with answers", "math_problem", environment=_MATH
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": HubDataset(
        "competition problems with integers as answers; prompts say how to answer", "dapo_math", environment=_MATH
    ),
    "openai/gsm8k": HubDataset("grade-school word problems", "gsm8k", {}, "main", _TESTED, _MATH),
    "HuggingFaceH4/MATH-500": HubDataset(
        "500 competition problems to evaluate on", "math_problem", splits=_ONLY_TEST, environment=_MATH
    ),
    "HuggingFaceH4/aime_2024": HubDataset("AIME 2024, 30 problems", "math_problem", {}, None, _ONLY_TRAIN, _MATH),
    "Maxwell-Jia/AIME_2024": HubDataset(
        "AIME 2024, 30 problems",
        "math_problem",
        {"problem": "Problem", "answer": "Answer", "solution": "Solution"},
        splits=_ONLY_TRAIN,
        environment=_MATH,
    ),
    "math-ai/aime25": HubDataset("AIME 2025, 30 problems", "math_problem", {}, None, _ONLY_TEST, _MATH),
    "yentinglin/aime_2025": HubDataset("AIME 2025, 30 problems", "math_problem", {}, None, _ONLY_TRAIN, _MATH),
    "opencompass/AIME2025": HubDataset(
        "AIME 2025, 15 problems of each part: the subset AIME2025-I or AIME2025-II",
        "math_problem",
        {"problem": "question"},
        subset="AIME2025-I",
        splits=_ONLY_TEST,
        environment=_MATH,
    ),
    "Idavidrein/gpqa": HubDataset(
        "graduate-level science, four options; needs HF_TOKEN", "gpqa", {}, "gpqa_diamond", _ONLY_TRAIN, _MATH
    ),
    "cais/mmlu": HubDataset(
        "57 subjects, four options", "multiple_choice", {}, "all", {"train": "auxiliary_train"}, _MATH
    ),
    "TIGER-Lab/MMLU-Pro": HubDataset(
        "14 subjects, up to ten options",
        "multiple_choice",
        splits={"train": "validation", "validation": "test"},
        environment=_MATH,
    ),
    "HuggingFaceH4/llava-instruct-mix-vsft": HubDataset(
        "conversations about photographs that LLaVA learned from", splits=_TESTED
    ),
    "hiyouga/geometry3k": HubDataset("geometry problems with a figure", "geometry3k", environment=_MATH),
    "leonardPKU/clevr_cogen_a_train": HubDataset(
        "questions that count objects in rendered scenes", "clevr_count", splits=_ONLY_TRAIN, environment=_MATH
    ),
    "lmms-lab/RefCOCO": HubDataset(
        "expressions for objects in photographs, with their boxes",
        "refcoco",
        splits={"train": "val", "validation": "test"},
    ),
    "rajpurkar/squad": HubDataset("questions about passages, answered by a part of the passage", "squad"),
    "OpenAssistant/oasst1": HubDataset("conversations by volunteers, along the best replies", "oasst"),
    "OpenAssistant/oasst2": HubDataset("conversations by volunteers, along the best replies", "oasst"),
    "allenai/tulu-3-sft-mixture": HubDataset("the conversations that Tulu 3 was fine-tuned on"),
    "HuggingFaceH4/ultrafeedback_binarized": HubDataset(
        "conversations that GPT-4 scored best", splits={"train": "train_sft", "validation": "test_sft"}
    ),
}
"""By the name on the hub, for algorithms that learn from answers and conversations."""

PREFERENCES: Mapping[str, HubDataset] = {
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": HubDataset("the pairs that Tulu 3 8B learned from"),
    "allenai/llama-3.1-tulu-3-70b-preference-mixture": HubDataset("the pairs that Tulu 3 70B learned from"),
    "nvidia/HelpSteer3": HubDataset(
        "two responses each, compared by people from -3 to 3", "helpsteer3", subset="preference"
    ),
    "HuggingFaceH4/ultrafeedback_binarized": HubDataset(
        "two responses each, scored by GPT-4", splits={"train": "train_prefs", "validation": "test_prefs"}
    ),
    "openbmb/UltraFeedback": HubDataset("four responses each, scored by GPT-4", "ultrafeedback"),
    "Anthropic/hh-rlhf": HubDataset(
        "two answers of an assistant each, one preferred for being helpful or harmless", splits=_TESTED
    ),
    "trl-lib/kto-mix-14k": HubDataset("single responses, each labelled good or bad", splits=_TESTED),
    "OpenAssistant/oasst1": HubDataset("replies ranked by volunteers", "oasst_preference"),
    "OpenAssistant/oasst2": HubDataset("replies ranked by volunteers", "oasst_preference"),
}
"""By the name on the hub, for algorithms that learn from preferences."""


def with_known(settings: DatasetConfig, purpose: Purpose, *, of_preferences: bool) -> DatasetConfig:
    """Return the settings of a dataset with known values for keys that the user has not set. With `input_key`, the rows
    are read without a processor.

    Args:
        settings: Settings of the dataset as the user wrote them.
        purpose: Purpose of the dataset, which selects the known split.
        of_preferences: True if the algorithm learns from preferences.
    """
    known = (PREFERENCES if of_preferences else DATASETS).get(settings.dataset_name or "")
    if known is None:
        return settings
    values = {
        "processor": None if {"input_key", "output_key"} & settings.model_fields_set else known.processor,
        "columns": dict(known.columns),
        "subset": known.subset,
        "split": known.splits.get(purpose),
        "env_name": known.environment or None,
    }
    if "processor" in settings.model_fields_set or values["processor"] is None:
        del values["columns"]
    unset = {key: value for key, value in values.items() if key not in settings.model_fields_set}
    return settings.model_copy(update=unset)
