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

from rl_core.config.dump import ABSENT as ABSENT
from rl_core.config.dump import Change as Change
from rl_core.config.dump import RuledChange as RuledChange
from rl_core.config.dump import as_written as as_written
from rl_core.config.dump import changed_as_written as changed_as_written
from rl_core.config.dump import changed_keys as changed_keys
from rl_core.config.dump import changed_to_yaml as changed_to_yaml
from rl_core.config.dump import diff as diff
from rl_core.config.dump import keys_when_changed as keys_when_changed
from rl_core.config.dump import rule_of as rule_of
from rl_core.config.dump import to_override as to_override
from rl_core.config.dump import to_yaml as to_yaml
from rl_core.config.dump import tree_to_yaml as tree_to_yaml
from rl_core.config.dump import with_absolute_paths as with_absolute_paths
from rl_core.config.explain import Explanation as Explanation
from rl_core.config.explain import explain as explain
from rl_core.config.explain import explain_all as explain_all
from rl_core.config.json_schema import JsonSchema as JsonSchema
from rl_core.config.keys import all_keys as all_keys
from rl_core.config.load import RawConfig as RawConfig
from rl_core.config.load import load as load
from rl_core.config.messages import Hint as Hint
from rl_core.config.messages import by_another_name as by_another_name
from rl_core.config.messages import did_you_mean as did_you_mean
from rl_core.config.messages import nearest as nearest
from rl_core.config.messages import nearest_as_remedy as nearest_as_remedy
from rl_core.config.renames import chosen as chosen
from rl_core.config.renames import moved as moved
from rl_core.config.resolve import Resolved as Resolved
from rl_core.config.resolve import Values as Values
from rl_core.config.resolve import locale_problem as locale_problem
from rl_core.config.resolve import refusal as refusal
from rl_core.config.resolve import resolve as resolve
from rl_core.config.resolve import values_of as values_of
from rl_core.config.schema import Config as Config
from rl_core.config.schema import EnvVars as EnvVars
from rl_core.config.schema import NamedConfig as NamedConfig
from rl_core.config.schema import PathText as PathText
from rl_core.config.schema import ProblemError as ProblemError
from rl_core.config.schema import Rename as Rename
from rl_core.config.schema import WhenChanged as WhenChanged
from rl_core.config.schema import assemble as assemble
from rl_core.config.schema import is_changed as is_changed
from rl_core.config.schema import plain as plain
from rl_core.config.schema import section_of as section_of
from rl_core.config.schema import settings_of as settings_of
from rl_core.config.tree import COMMAND_LINE as COMMAND_LINE
from rl_core.config.tree import DEFAULT as DEFAULT
from rl_core.config.tree import PYTHON as PYTHON
from rl_core.config.tree import Origin as Origin
from rl_core.config.tree import given_in as given_in
from rl_core.config.tree import option as option
from rl_core.errors import Problem as Problem
from rl_core.errors import show as show
