"""Typed, strict configs from recipes, with one clear error for everything wrong in one.

    class GRPOConfig(Config):
        seed: int = Field(default=42, ge=0)  # a string below the field documents it

    root = assemble("Root", {"grpo": GRPOConfig, "policy": PolicyConfig})  # sections come from plugins
    raw = load("grpo-math-1b", ["grpo.seed=7"], search=[recipes])  # YAML, `defaults:`, overrides, origins
    resolved = resolve(raw, root)  # `${...}`, types; a ConfigError lists every problem
    resolved.config.grpo.seed  # 7
    resolved.origin("grpo.seed")  # command line
    explain(root, "grpo.seed", resolved).doc  # what the key means
    diff(earlier.config, resolved.config)  # [Change("grpo.seed", 42, 7)]
    Path("config.yaml").write_text(to_yaml(resolved.config))  # loads back to an equal config

Of several layers the later wins: defaults of the types, `defaults:` of a file in order, the file, the command line.
Sections and mappings of files merge key by key; a list, and the default of a field with free keys (`dict[str, Any]`),
is replaced as a whole, and so is a section whose `name` chooses another `module:function`. Unquoted scalars follow
YAML 1.2 (`no` is text, `1e-5` a number) and reach a text field as typed.
"""

from rl_core.config.dump import (
    ABSENT,
    Change,
    RuledChange,
    as_written,
    changed_as_written,
    changed_keys,
    changed_to_yaml,
    diff,
    keys_when_changed,
    rule_of,
    to_override,
    to_yaml,
    tree_to_yaml,
    with_absolute_paths,
)
from rl_core.config.explain import Explanation, explain, explain_all
from rl_core.config.json_schema import JsonSchema
from rl_core.config.keys import all_keys
from rl_core.config.load import RawConfig, load
from rl_core.config.messages import Hint, by_another_name, did_you_mean, nearest, nearest_as_remedy
from rl_core.config.renames import chosen, moved
from rl_core.config.resolve import Resolved, Values, locale_problem, refusal, resolve, values_of
from rl_core.config.schema import (
    Config,
    EnvVars,
    NamedConfig,
    PathText,
    ProblemError,
    Rename,
    WhenChanged,
    assemble,
    is_changed,
    plain,
    section_of,
    settings_of,
)
from rl_core.config.tree import COMMAND_LINE, DEFAULT, PYTHON, Origin, given_in, option
from rl_core.errors import Problem, show

__all__ = [
    "ABSENT",
    "COMMAND_LINE",
    "DEFAULT",
    "PYTHON",
    "Change",
    "Config",
    "EnvVars",
    "Explanation",
    "Hint",
    "JsonSchema",
    "NamedConfig",
    "Origin",
    "PathText",
    "Problem",
    "ProblemError",
    "RawConfig",
    "Rename",
    "Resolved",
    "RuledChange",
    "Values",
    "WhenChanged",
    "all_keys",
    "as_written",
    "assemble",
    "by_another_name",
    "changed_as_written",
    "changed_keys",
    "changed_to_yaml",
    "chosen",
    "did_you_mean",
    "diff",
    "explain",
    "explain_all",
    "given_in",
    "is_changed",
    "keys_when_changed",
    "load",
    "locale_problem",
    "moved",
    "nearest",
    "nearest_as_remedy",
    "option",
    "plain",
    "refusal",
    "resolve",
    "rule_of",
    "section_of",
    "settings_of",
    "show",
    "to_override",
    "to_yaml",
    "tree_to_yaml",
    "values_of",
    "with_absolute_paths",
]
