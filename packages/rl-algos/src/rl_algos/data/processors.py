"""Processors, which make an example of a row, by the name that a dataset gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_algos.data.assistant_trees import conversations, ranked_replies
from rl_algos.data.choices import gpqa, multiple_choice
from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, Processor, by_keys, plain_text
from rl_algos.data.files import Rows
from rl_algos.data.image_problems import clevr_count, geometry3k, llava, refcoco
from rl_algos.data.preference import helpsteer3, preference, ultrafeedback
from rl_algos.data.problems import dapo_math, gsm8k, math_problem, numina_cot, openmathinstruct2, openr1_math, squad
from rl_core.config import did_you_mean
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import resolve
from rl_core.user_code import is_in_file, place_of, raised_at

PROCESSORS: Mapping[str, Processor] = {
    "clevr_count": clevr_count,
    "dapo_math": dapo_math,
    "geometry3k": geometry3k,
    "gpqa": gpqa,
    "gsm8k": gsm8k,
    "helpsteer3": helpsteer3,
    "llava": llava,
    "math_problem": math_problem,
    "multiple_choice": multiple_choice,
    "numina_cot": numina_cot,
    "oasst": by_keys,
    "oasst_preference": preference,
    "openmathinstruct2": openmathinstruct2,
    "openr1_math": openr1_math,
    "preference": preference,
    "refcoco": refcoco,
    "squad": squad,
    "text": plain_text,
    "ultrafeedback": ultrafeedback,
}
"""Processors by the name that `processor` takes."""

_ARRANGED: Mapping[str, Callable[[Rows], Rows]] = {"oasst": conversations, "oasst_preference": ranked_replies}
"""Preparation of all rows, before a processor gets them one by one, by the name of the processor."""


def arranged(rows: Rows, settings: DatasetConfig) -> Rows:
    """The rows that the dataset's processor takes: those of files, unless an example is made of several."""
    arrange = _ARRANGED.get(settings.processor or "")
    return rows if arrange is None else arrange(rows)


def check_streamable(settings: DatasetConfig) -> None:
    """Raise a `DataError` if an example of this dataset is made of several rows, which must then all be read."""
    if settings.processor in _ARRANGED:
        raise DataError(
            f"{settings.source!r} cannot be streamed, because an example consists of several rows; remove `streaming`"
        )


def processor(settings: DatasetConfig, default: Processor = by_keys) -> Processor:
    """The dataset's processor; `default` if its settings name none.

    Raises:
        ConfigError: If the name is neither built in nor that of a function.
    """
    name = settings.processor
    if name is None:
        return default
    if ":" not in name:
        if name not in PROCESSORS:
            raise ConfigError(
                f"data: {name!r} is not a processor{did_you_mean(name, PROCESSORS)}; allowed: {', '.join(PROCESSORS)}, "
                "or your own function as package.module:function or file.py:function"
            )
        return PROCESSORS[name]
    try:
        found = resolve(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"data: processor {name!r} cannot be imported: {error}") from error
    return _callable(found, name)


def _callable(found: Any, name: str) -> Processor:
    """A processor that takes a row and the settings of its dataset; refuses anything else."""
    shown = _shown(found, name)
    try:
        inspect.signature(found).bind({}, None)
    except TypeError as error:
        raise ConfigError(
            f"data: processor {shown} cannot be called with a row and the settings of its dataset: {error}; define it "
            f"as def {getattr(found, '__name__', 'convert')}(row, settings) -> Example"
        ) from None

    def convert(row: Mapping[str, Any], settings: DatasetConfig) -> Example:
        try:
            example = found(row, settings)
        except DataError:
            raise
        except Exception as error:  # a failure in the user's code becomes a report that names the row
            where = raised_at(error)
            raise DataError(
                f"the processor {shown} raised {type(error).__name__}: {error}{f' (at {where})' if where else ''}; "
                f"the columns are {', '.join(sorted(row))}"
            ) from error
        if not isinstance(example, Example):
            raise DataError(
                f"the processor {shown} returned {type(example).__name__}; return an rl_algos.Example(messages, answer)"
            )
        return example

    return convert


def _shown(found: Any, name: str) -> str:
    place = place_of(found)
    short = f"{Path(name.rpartition(':')[0]).name}:{name.rpartition(':')[2]}" if is_in_file(name) else name
    return f"{short} ({place})" if place else short
