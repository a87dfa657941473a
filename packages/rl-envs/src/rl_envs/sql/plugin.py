"""Settings and declarations of the environment `sql` and of the dataset `sql_questions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config import Config, PathText, WhenChanged
from rl_core.environments.config import EnvironmentConfig
from rl_core.plugins import DatasetPlugin, EnvironmentPlugin, Requirement


class SQLConfig(EnvironmentConfig):
    """Run the last SQL of a response on a SQLite database, and compare what it returns with the result of the row's
    query."""

    databases: PathText | None = None
    """Folder with a file `NAME/NAME.sqlite` for each database, as Spider and BIRD have them; must be set. Queries only
    read them."""
    match: Literal["rows", "set"] = "rows"
    """Comparison of results: `rows`, with their number, and in order if the row's query has ORDER BY; `set`, without
    either, as BIRD compares them."""
    max_instructions: int = Field(default=50_000_000, ge=1000)
    """Maximum number of instructions of SQLite's virtual machine for a query, which takes a few seconds for that many.
    Unlike a time limit, it stops the same queries on every machine."""
    max_rows: int = Field(default=10_000, ge=1)
    """Maximum number of rows of a result; a query that returns more is wrong."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=60.0, gt=0)
    """Timeout in seconds of a call of the environment."""


class SQLQuestionsSettings(Config):
    """Questions about SQLite databases, from a JSON file in the form of Spider or BIRD."""

    path: PathText
    """A `.json` file with a list of questions, or a `.jsonl` file with one per line: objects with `question`, `db_id`
    and `query` (Spider) or `SQL` (BIRD, whose `evidence` is shown too)."""
    databases: PathText
    """Folder of the databases, whose schemas the prompts show, as of the environment `sql`."""
    num_examples: int = Field(default=2, ge=0, le=20)
    """Number of rows of each table that a prompt shows."""


PLUGIN = EnvironmentPlugin(
    "sql",
    SQLConfig,
    "rl_envs.sql.environment:SQLEnvironment",
    Requirement("rl-envs"),
    row_check="rl_envs.sql.environment:check_row",
)

DATASET = DatasetPlugin(
    "sql_questions", "rl_envs.sql.dataset:load", Requirement("rl-envs"), settings=SQLQuestionsSettings
)
