"""Questions about databases, in the forms of Spider and BIRD."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_envs.sql.database import QueryFailed, database_path, schema_of
from rl_envs.sql.plugin import SQLQuestionsSettings

_ASKED = """{schema}

{evidence}Answer this question by one SQLite query, in a block between ```sql and ```:
{question}"""


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Return rows with `messages`, `info` (`db_id` and `answer`, the query) and `environment`; the file is all of the
    split.

    Raises:
        DataError: If the file, or a database, cannot be read.
    """
    config = SQLQuestionsSettings.model_validate(dict(settings))
    path = Path(config.path)

    @cache
    def schema(name: str) -> str:
        return schema_of(database_path(config.databases, name), config.num_examples)

    try:
        text = path.read_text(encoding="utf-8")
        given = list(map(json.loads, filter(str.strip, text.splitlines()))) if path.suffix == ".jsonl" else None
        questions = json.loads(text) if given is None else given
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(questions, list) or not questions:
        raise DataError(f"{path} must have a list of questions")
    rows = []
    for number, each in enumerate(questions, 1):
        try:
            query = each["SQL"] if "SQL" in each else each["query"]
            evidence = f"{each['evidence'].strip()}\n" if each.get("evidence") else ""
            asked = _ASKED.format(schema=schema(each["db_id"]), evidence=evidence, question=each["question"].strip())
            info = {"db_id": each["db_id"], "answer": query}
        except KeyError as error:
            raise DataError(f"{path}: question {number} has no {error}; it has {', '.join(sorted(each))}") from None
        except (QueryFailed, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: question {number}: {error}") from None
        rows.append({"messages": [{"role": "user", "content": asked}], "info": info, "environment": "sql"})
    return rows
