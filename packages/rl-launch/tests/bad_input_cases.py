"""Mistakes of users that are found before a run starts: arguments of `rl train`, files, and what the message shows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import NOT_GIVEN, show

SFT, GRPO = "sft-arithmetic", "grpo-arithmetic"
QUESTION = {"messages": [{"role": "user", "content": "1+2="}], "answer": "3", "environment": "math"}

Files = Callable[[Path], object]
"""Writes what a case needs into the folder that the command runs in; what it returns lives as long as the command."""


@dataclass(frozen=True)
class Case:
    """A wrong command.

    Args:
        name: The mistake.
        arguments: Arguments of `rl train`.
        key: Key of the config that the message is about; empty if there is none.
        got: The value that the message shows, if it shows one.
        allowed: Part of the accepted values in the message; empty if it lists none.
        shows: Names, numbers and places in the message. They are compared, because the wording may change.
        files: Writes the files next to the config.
    """

    name: str
    arguments: tuple[str, ...]
    key: str = ""
    got: Any = NOT_GIVEN
    allowed: str = ""
    shows: tuple[str, ...] = ()
    files: Files = lambda folder: None

    def missing_from(self, message: str) -> list[str]:
        """Return the parts that a message lacks."""
        wanted = [rf"{re.escape(each)}" for each in self.shows]
        if self.key:
            wanted.append(rf"(?m:^(error:|) *{re.escape(self.key)} \()")
        if self.got is not NOT_GIVEN:
            wanted.append(f"got {re.escape(show(self.got))}")
        if self.allowed:
            wanted.append(rf"allowed: .*{re.escape(self.allowed)}")
        assert wanted, f"the case {self.name!r} expects nothing"
        return [each for each in wanted if not re.search(each, message)]


def _case(name: str, *arguments: str, **expected: Any) -> Case:
    return Case(name, arguments, **expected)


def _text(content: str | bytes, name: str = "recipe.yaml") -> Files:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _recipe(*lines: str) -> Files:
    return _text("\n".join((f"defaults: {GRPO}", *lines, "")))


def _rows(*rows: object) -> Files:
    return _text("".join(json.dumps(row) + "\n" for row in rows), "rows.jsonl")


def _model(*without: str, template: bool = True, eos: bool = True, config: dict | str | None = None) -> Files:
    """A tiny model in `model`, without some of its files or parts of its tokenizer."""

    def write(folder: Path) -> None:
        from rl_algos.tiny_model import make_tiny_model

        made = folder / "model"
        make_tiny_model(made, hidden_size=16, num_layers=2, num_heads=4, num_key_value_heads=2)
        if not template:
            (made / "chat_template.jinja").unlink()
        if not eos:
            _change(made / "tokenizer_config.json", eos_token=None)
        if isinstance(config, str):
            (made / "config.json").write_text(config)
        elif config:
            _change(made / "config.json", **config)
        for name in without:
            (made / name).unlink()

    return write


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _both(first: Files, second: Files) -> Files:
    return lambda folder: (first(folder), second(folder))


def _run_of(*overrides: str) -> Files:
    """A run directory `run`, as a run of these settings leaves it."""

    def write(folder: Path) -> None:
        from rl_launch.run_config.reading import read_plan
        from rl_launch.run_session import RunDirectory

        _model()(folder)
        directory = RunDirectory(folder / "run")
        directory.open(read_plan(SFT, (*RUN, *overrides)).config)
        directory.close()

    return write


def _busy(folder: Path) -> object:
    from rl_launch.run_session.directory.lock import DirectoryLock

    _run_of()(folder)
    held = DirectoryLock(folder / "run")
    held.acquire()
    return held


def _foreign(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("words")


ROWS, MODEL = "data.train={data_path: rows.jsonl}", "policy.model_name=./model"
NO_VALIDATION = "data.validation=null"
SMALL = "{dataset_name: arithmetic, settings: {max_operand: 9}}"
RUN = (MODEL, f"data.train={SMALL}", f"data.validation={SMALL}", "run_dir=run")
MEGATRON = "policy.megatron_cfg.enabled=true"

_SPELLING = (
    _case("unknown key", GRPO, "grpo.sede=1", key="grpo.sede", shows=("command line", "grpo.seed")),
    _case("unknown section", GRPO, "grop.seed=1", key="grop", shows=("command line", "grpo")),
    _case(
        "unknown key in a file",
        "recipe.yaml",
        key="grpo.max_num_step",
        shows=("recipe.yaml:4", "grpo.max_num_steps"),
        files=_recipe("grpo:", "  seed: 1", "  max_num_step: 3"),
    ),
    _case(
        "callback with a misspelled hook",
        SFT,
        "callbacks=[{type: mine.py:Mine, on_error: stop}]",
        key="callbacks[0].type",
        shows=("command line", "Mine", "on_stpe", "on_step"),
        files=_text("from rl_core import Callback\nclass Mine(Callback):\n    def on_stpe(self): ...\n", "mine.py"),
    ),
    _case("wrong type", GRPO, "grpo.seed=many", key="grpo.seed", got="many", allowed="int", shows=("command line",)),
    _case("fraction for a count", SFT, "sft.max_num_steps=1.5", key="sft.max_num_steps", got=1.5, allowed="int > 0"),
    _case(
        "negative number",
        GRPO,
        "grpo.num_prompts_per_step=-1",
        key="grpo.num_prompts_per_step",
        got=-1,
        allowed="int > 0",
    ),
    _case(
        "zero where it means nothing",
        GRPO,
        "checkpointing.keep_top_k=0",
        key="checkpointing.keep_top_k",
        got=0,
        allowed="int > 0 or null",
    ),
    _case(
        "a choice that there is not",
        GRPO,
        "policy.precision=float8",
        key="policy.precision",
        got="float8",
        allowed="float32, bfloat16, float16",
    ),
    _case(
        "text for a switch", GRPO, "grpo.val_at_start=yes", key="grpo.val_at_start", got="yes", allowed="true or false"
    ),
    _case(
        "a value for a section", GRPO, "policy.optimizer=adam", key="policy.optimizer", shows=("policy.optimizer.KEY",)
    ),
    _case(
        "a store that there is not",
        SFT,
        "checkpointing.push_to=s4://bucket/x",
        key="checkpointing.push_to",
        shows=("s4://bucket/x", "s3://BUCKET/FOLDER"),
    ),
    _case("no path", SFT, "run_dir=", key="run_dir", got="", shows=("command line",)),
    _case("no model name", SFT, "policy.model_name=", key="policy.model_name", got=""),
    _case(
        "a section of another algorithm",
        GRPO,
        "value.model_name=x",
        key="value",
        shows=("command line", "ppo", "algorithm: grpo"),
    ),
    _case(
        "generated data in a run that generates nothing",
        SFT,
        "env.math.answer_format=numeric",
        key="env",
        shows=("sft generates only to score tasks", "eval.tasks", "eval.period", "remove this key"),
    ),
    _case(
        "a file for a dataset",
        GRPO,
        "data.train=rows.jsonl",
        key="data.train",
        got="rows.jsonl",
        shows=("data.train.data_path=rows.jsonl",),
    ),
    _case("a name for a dataset", SFT, "data.train=gsm8k", key="data.train", shows=("data.train.dataset_name=gsm8k",)),
    _case("two things wrong", GRPO, "grpo.seed=x", "grpo.sede=1", shows=("2 problems", "grpo.seed (", "grpo.sede (")),
    _case("generation where nothing is generated", SFT, "policy.generation.top_p=1", key="policy.generation"),
)

_TEXT = (
    _case(
        "duplicated key",
        "recipe.yaml",
        shows=("recipe.yaml:4", "grpo.seed", "line 3"),
        files=_recipe("grpo:", "  seed: 1", "  seed: 2"),
    ),
    _case(
        "broken YAML", "recipe.yaml", shows=("recipe.yaml:2", "YAML", "close the {"), files=_recipe("grpo: {seed: 1")
    ),
    _case("tabs", "recipe.yaml", shows=("recipe.yaml", "spaces"), files=_recipe("grpo:", "\tseed: 1")),
    _case("a list for a recipe", "recipe.yaml", shows=("recipe.yaml", "key: value"), files=_text("- grpo\n")),
    _case("a file that is no text", "recipe.yaml", shows=("recipe.yaml", "UTF-8"), files=_text(b"\xff\xfe\x00g")),
    _case("YAML tag", "recipe.yaml", shows=("recipe.yaml", "!!python/name"), files=_recipe("x: !!python/name y")),
    _case(
        "merge key",
        "recipe.yaml",
        shows=("recipe.yaml", "defaults:"),
        files=_recipe("a: &a {seed: 1}", "grpo:", "  <<: *a"),
    ),
    _case(
        "a value that must be set",
        "recipe.yaml",
        key="policy.model_name",
        shows=("recipe.yaml:3", "???"),
        files=_recipe("policy:", "  model_name: ???"),
    ),
    _case("interpolation of no key", GRPO, "grpo.seed=${grpo.sede}", shows=("grpo.sede", "grpo.seed")),
    _case(
        "interpolation in a circle",
        GRPO,
        "grpo.val_period=${grpo.max_num_steps}",
        "grpo.max_num_steps=${grpo.val_period}",
        shows=("grpo.val_period", "grpo.max_num_steps"),
    ),
    _case(
        "interpolation left open",
        GRPO,
        "logger.wandb.project=${grpo.seed",
        shows=("logger.wandb.project", "${grpo.seed"),
    ),
    _case(
        "notifications by a program that does not exist",
        GRPO,
        "logger.notify.command=[/no/such/program]",
        shows=("logger.notify.command", "/no/such/program"),
    ),
    _case(
        "a webhook that is no URL", GRPO, "logger.notify.url=hooks.example", shows=("logger.notify.url", "https://HOST")
    ),
    _case("unknown defaults", "recipe.yaml", shows=("grpo-maths", "grpo-math"), files=_text("defaults: grpo-maths")),
    _case(
        "defaults in a circle",
        "recipe.yaml",
        shows=("defaults", "recipe.yaml"),
        files=_text("defaults: ./recipe.yaml\n"),
    ),
    _case("unknown recipe", "grpo-arithmatic", shows=("grpo-arithmatic", "grpo-arithmetic")),
    _case("missing recipe file", "mine.yaml", shows=("mine.yaml",)),
    _case("override without =", GRPO, "grpo.seed", shows=("key=value: grpo.seed=VALUE",)),
    _case("override with a colon", GRPO, "grpo.seed: 3", shows=("key=value: grpo.seed=3",)),
    _case("override in three words", GRPO, "grpo.seed", "=", "3", shows=("without spaces: grpo.seed=3",)),
    _case("two recipes", SFT, GRPO, shows=(GRPO, "one recipe")),
    _case("two files", SFT, "recipe.yaml", shows=("recipe.yaml", "one recipe"), files=_recipe()),
    _case(
        "data in the recipe's place",
        "rows.jsonl",
        shows=("rows.jsonl is data", "data.train.data_path=rows.jsonl"),
        files=_rows(QUESTION),
    ),
    _case("a model in the recipe's place", "./model", shows=("policy.model_name=./model",), files=_model()),
    _case("a recipe without its ending", "recipe", shows=("recipe.yaml?",), files=_recipe()),
    _case("override in the recipe's place", "grpo.seed=1", shows=("rl train RECIPE grpo.seed=1",)),
    _case("override with a mark", GRPO, "+grpo.seed=1", shows=("+grpo.seed", "key=value")),
    _case("override of an entry that is not there", GRPO, "data.train[3].split=x", shows=("data.train[3]", "[3]")),
    _case(
        "unclosed list in an override",
        GRPO,
        "policy.generation.stop_strings=[a",
        shows=("policy.generation.stop_strings=[a", "YAML"),
    ),
)

_PLUGINS = (
    _case("unknown algorithm", GRPO, "algorithm=grop", key="algorithm", got="grop", allowed="grpo"),
    _case("no algorithm", "recipe.yaml", key="algorithm", allowed="grpo", files=_text("policy: {}\n")),
    _case(
        "unknown generation backend",
        GRPO,
        "policy.generation.backend=vlm",
        key="policy.generation.backend",
        got="vlm",
        allowed="vllm",
    ),
    _case(
        "two training backends",
        GRPO,
        "policy.dtensor_cfg.enabled=true",
        MEGATRON,
        key="policy",
        shows=("policy.dtensor_cfg.enabled", "policy.megatron_cfg.enabled"),
    ),
    _case(
        "no training backend",
        GRPO,
        "policy.dtensor_cfg.enabled=false",
        key="policy",
        shows=("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=true"),
    ),
    _case(
        "unknown environment",
        GRPO,
        "data.default.env_name=maths",
        key="data.default.env_name",
        shows=("maths", "math?"),
    ),
    _case(
        "invalid pattern in a row",
        GRPO,
        "data.train={data_path: rows.jsonl, env_name: match}",
        "env.match.mode=regex",
        shows=("rows.jsonl, line 2", "`pattern` is not a regular expression"),
        files=_rows({"prompt": "a", "pattern": "a"}, {"prompt": "a", "pattern": "(a"}),
    ),
    _case(
        "a row with an unknown environment",
        GRPO,
        ROWS,
        shows=("rows.jsonl, line 2", "mth", "math?"),
        files=_rows(QUESTION, {**QUESTION, "environment": "mth"}),
    ),
    _case(
        "a row without an environment",
        GRPO,
        ROWS,
        shows=("rows.jsonl, line 1", "env_name"),
        files=_rows({"messages": "1+2="}),
    ),
    _case("unknown dataset", SFT, "data.train={dataset_name: arithmetc}", shows=("arithmetc", "arithmetic")),
    _case(
        "unknown dataset with settings",
        SFT,
        "data.train.dataset_name=arithmetc",
        "data.train.settings.max_operand=9",
        shows=("arithmetc", "arithmetic"),
    ),
    _case(
        "unknown setting of a dataset",
        SFT,
        "data.train.settings={max_operant: 9}",
        shows=("arithmetic", "max_operant", "9"),
    ),
    _case("unknown split", SFT, "data.train.split=dev", shows=("train", "validation", "dev")),
    _case("unknown processor", SFT, "data.train.processor=gsm", shows=("gsm", "gsm8k")),
    _case(
        "a processor that is not there", SFT, "data.train.processor=mine:rows", shows=("data.train.processor", "mine")
    ),
    *(
        _case(
            f"{extra} without its extra",
            SFT,
            f"logger.{extra}_enabled=true",
            shows=(extra, f"pip install 'rl-launch[{extra}]'"),
        )
        for extra in ("wandb", "mlflow")
        if importlib.util.find_spec(extra) is None
    ),
)

_DATA = (
    _case(
        "an agent for an environment that runs none",
        GRPO,
        "grpo.agent={command: [python, x.py], place: environment}",
        shows=("math", "grpo.agent.place", "process"),
    ),
    _case(
        "an environment that runs agents, without one",
        GRPO,
        "data.train={dataset_name: calculations, settings: {form: repository}}",
        shows=("calculations", "repository", "grpo.agent.place", "environment"),
    ),
    _case(
        "an environment that runs a command, without one",
        GRPO,
        "data.train={dataset_name: calculations, settings: {form: repository}}",
        "grpo.agent={place: environment}",
        shows=("calculations", "repository", "grpo.agent.command"),
    ),
    _case(
        "a command for an environment that brings its agent",
        GRPO,
        "data.train.env_name=verifiers",
        "grpo.agent={command: [python, x.py], place: environment}",
        shows=("arithmetic", "verifiers", "remove grpo.agent.command"),
    ),
    _case(
        "an opponent without weights",
        "grpo-self-play-tiny",
        "grpo.agents.second={opponent: {pool: 2}}",
        shows=("grpo.agents.second.opponent", "update_every", "model_name"),
    ),
    _case(
        "an opponent whose model does not exist",
        "grpo-self-play-tiny",
        "grpo.agents.second={opponent: {model_name: ./absent}}",
        shows=("grpo.agents.second.opponent.model_name", "./absent"),
    ),
    _case("missing data file", SFT, ROWS, shows=("rows.jsonl",)),
    _case(
        "malformed JSONL line",
        SFT,
        ROWS,
        shows=("rows.jsonl, line 2", "Expecting value", "column 14"),
        files=_text(json.dumps(QUESTION) + '\n{"messages": \n', "rows.jsonl"),
    ),
    _case("a JSONL row that is a list", SFT, ROWS, shows=("rows.jsonl, line 1", "JSON object"), files=_rows([1])),
    _case(
        "missing column",
        SFT,
        "data.train={data_path: rows.jsonl, input_key: qestion}",
        shows=("rows.jsonl, line 1", "qestion", "question", "answer"),
        files=_rows({"question": "1+2=", "answer": "3"}),
    ),
    _case("empty dataset", SFT, ROWS, shows=("rows.jsonl", "no rows"), files=_rows()),
    _case(
        "a kind of file that cannot be read",
        SFT,
        "data.train={data_path: rows.txt}",
        shows=("rows.txt", ".jsonl"),
        files=_text("a,b\n", "rows.txt"),
    ),
    _case(
        "a dataset by name and by path",
        SFT,
        "data.train.data_path=rows.jsonl",
        "data.train.dataset_name=arithmetic",
        key="data.train",
        shows=("dataset_name", "data_path"),
    ),
    _case("a dataset by nothing", SFT, "data.train={}", key="data.train", shows=("dataset_name", "data_path")),
    _case("no dataset in the list", SFT, "data.train=[]", key="data.train"),
    _case(
        "weights for some datasets",
        SFT,
        "data.train=[{dataset_name: arithmetic, weight: 1.0}, {dataset_name: arithmetic}]",
        key="data.train",
        shows=("weight",),
    ),
    _case(
        "more rows than there are",
        SFT,
        "data.train.settings={max_operand: 9, num_rows: 900}",
        shows=("arithmetic", "900"),
    ),
    _case("missing prompt file", SFT, "data.default.prompt_file=p.txt", shows=("prompt_file", "p.txt")),
    _case(
        "a prompt file without a place for the input",
        SFT,
        "data.default.prompt_file=p.txt",
        shows=("p.txt", "placeholder"),
        files=_text("Add!", "p.txt"),
    ),
    _case(
        "a row without anything to learn",
        SFT,
        ROWS,
        NO_VALIDATION,
        "sft.val_period=0",
        "sft.stop_at_validation_loss=null",
        MODEL,
        shows=("rows.jsonl, line 1", "assistant"),
        files=_both(_model(), _rows({"messages": "1+2="})),
    ),
    _case(
        "prompts longer than the limit",
        GRPO,
        ROWS,
        MODEL,
        shows=("rows.jsonl, line 1", "24 tokens", "data.max_input_seq_length"),
        files=_both(_model(), _rows({**QUESTION, "messages": "1+" * 40})),
    ),
)

_MODELS = (
    _case("missing model folder", SFT, MODEL, key="policy.model_name", got="./model", shows=("command line",)),
    _case(
        "a model neither here nor on a hub that may be asked",
        SFT,
        "policy.model_name=no-such/model",
        shows=("policy.model_name", "no-such/model", "HF_HUB_OFFLINE", "hf download"),
    ),
    _case("a path that is taken for no hub name", SFT, "policy.model_name=a/b/c", key="policy.model_name", got="a/b/c"),
    _case(
        "adapters on layers that the model does not have",
        SFT,
        MODEL,
        "policy.lora_cfg={enabled: true, match_all_linear: false, target_modules: [q_projj]}",
        key="policy.lora_cfg.target_modules",
        got="q_projj",
        allowed="q_proj",
        shows=("q_proj?",),
        files=_model(),
    ),
    _case(
        "no such class of torch",
        SFT,
        "policy.optimizer.name=torch.optim.AdamX",
        key="policy.optimizer.name",
        got="torch.optim.AdamX",
        shows=("command line", "torch.optim.Adam"),
    ),
    _case(
        "a schedule without its length",
        SFT,
        "policy.scheduler=[{name: torch.optim.lr_scheduler.CosineAnnealingLR}]",
        key="policy.scheduler[0].kwargs.T_max",
        shows=("CosineAnnealingLR",),
    ),
    _case(
        "target modules with adapters on all layers",
        SFT,
        "policy.lora_cfg={enabled: true, target_modules: [qproj]}",
        key="policy.lora_cfg.target_modules",
        shows=("command line", "match_all_linear=false"),
    ),
    _case(
        "an argument that the optimizer does not take",
        SFT,
        "policy.optimizer.kwargs={lr: 1e-3, weight_decy: 0.1}",
        key="policy.optimizer.kwargs.weight_decy",
        shows=("weight_decay",),
    ),
    _case(
        "an argument that the schedule does not take",
        SFT,
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_steps: 9}}]",
        key="policy.scheduler[0].kwargs.total_steps",
        shows=("LinearLR",),
    ),
    _case(
        "model folder without config.json",
        SFT,
        MODEL,
        key="policy.model_name",
        got="./model",
        shows=("config.json,", "tokenizer.json", "save_pretrained"),
        files=_model("config.json"),
    ),
    _case(
        "model folder without weights",
        SFT,
        MODEL,
        key="policy.model_name",
        got="./model",
        shows=("model.safetensors or model.safetensors.index.json", "save_pretrained"),
        files=_model("model.safetensors"),
    ),
    _case(
        "model folder without a tokenizer",
        SFT,
        MODEL,
        key="policy.model_name",
        got="./model",
        shows=("tokenizer.json", "policy.tokenizer.name"),
        files=_model("tokenizer.json"),
    ),
    _case(
        "config.json that is not JSON",
        SFT,
        MODEL,
        key="policy.model_name",
        shows=("model/config.json",),
        files=_model(config="{"),
    ),
    _case("missing tokenizer folder", SFT, "policy.tokenizer.name=./words", key="policy.tokenizer.name", got="./words"),
    _case(
        "tokenizer without a chat template",
        SFT,
        MODEL,
        shows=("policy.tokenizer.chat_template",),
        files=_model(template=False),
    ),
    _case("tokenizer without an end of sequence", SFT, MODEL, shows=("eos_token",), files=_model(eos=False)),
    _case(
        "missing template file",
        SFT,
        "policy.tokenizer.chat_template=chat.jinja",
        key="policy.tokenizer.chat_template",
        shows=("chat.jinja",),
    ),
    _case(
        "a template variable with no name",
        SFT,
        "policy.tokenizer.chat_template_kwargs={a-b: 1}",
        key="policy.tokenizer.chat_template_kwargs",
        shows=("a-b",),
    ),
)

_SIZES = (
    _case(
        "batch sizes that do not divide",
        GRPO,
        "policy.train_global_batch_size=100",
        key="policy.train_global_batch_size",
        shows=("100", "512", "grpo.num_prompts_per_step"),
    ),
    _case(
        "a group of one",
        GRPO,
        "grpo.num_generations_per_prompt=1",
        key="grpo.num_generations_per_prompt",
        shows=("at least 2",),
    ),
    _case(
        "no room for a prompt",
        GRPO,
        "policy.generation.max_new_tokens=32",
        key="policy.generation.max_new_tokens",
        shows=("32", "policy.max_total_sequence_length"),
    ),
    _case(
        "max_model_len too small",
        GRPO,
        "policy.generation.vllm_cfg.max_model_len=6",
        key="policy.generation.vllm_cfg.max_model_len",
        shows=("6", "max_new_tokens", "8"),
    ),
    _case(
        "max_input_seq_length too large",
        SFT,
        "data.max_input_seq_length=64",
        key="data.max_input_seq_length",
        shows=("64",),
    ),
    _case(
        "a mesh that the ranks do not fill",
        SFT,
        "policy.dtensor_cfg.tensor_parallel_size=3",
        key="policy.dtensor_cfg.tensor_parallel_size",
        got=3,
        shows=("command line", "policy", "3 ranks", "its ranks, 2"),
    ),
    _case(
        "a mesh that the ranks do not fill, on Megatron",
        SFT,
        MEGATRON,
        "policy.megatron_cfg.pipeline_model_parallel_size=3",
        key="policy.megatron_cfg.pipeline_model_parallel_size",
        got=3,
        shows=("command line", "policy", "3 ranks", "its ranks, 2"),
    ),
    _case(
        "pipeline stages without ranks for them",
        GRPO,
        "cluster.cpu_ranks_per_node=1",
        "policy.dtensor_cfg.pipeline_parallel_size=2",
        key="policy.dtensor_cfg.pipeline_parallel_size",
        got=2,
        shows=("2 ranks", "cluster.cpu_ranks_per_node"),
    ),
    _case(
        "a replica that is larger than a node",
        GRPO,
        "cluster.device=rehearsal",
        "cluster.gpus_per_node=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
        key="policy.generation.vllm_cfg.tensor_parallel_size",
        got=4,
        shows=("command line", "2 GPUs"),
    ),
    _case(
        "more ranks and engines than fit into any memory",
        GRPO,
        "cluster.device=rehearsal",
        "cluster.gpus_per_node=64",
        "cluster.num_nodes=4096",
        "policy.train_global_batch_size=512",
        shows=("262144 ranks and 262144 engines", "cluster.num_nodes", "cluster.gpus_per_node"),
    ),
    _case(
        "a mesh that does not divide a model that is made here",
        SFT,
        "policy.dtensor_cfg.tensor_parallel_size=3",
        "cluster.cpu_ranks_per_node=3",
        shows=("policy.dtensor_cfg.tensor_parallel_size", "got 3", "4 attention heads"),
    ),
    _case(
        "a generator that does not divide a model that is made here",
        GRPO,
        "policy.model_name=tiny-arithmetic",
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        shows=("policy.generation.vllm_cfg.tensor_parallel_size", "got 3", "4 attention heads"),
    ),
    _case(
        "a mesh that does not divide the model",
        SFT,
        MODEL,
        "policy.dtensor_cfg.tensor_parallel_size=8",
        "cluster.cpu_ranks_per_node=8",
        key="policy.dtensor_cfg.tensor_parallel_size",
        shows=("8", "4 attention heads"),
        files=_model(),
    ),
    _case(
        "a mesh that does not divide the model, on Megatron",
        SFT,
        MODEL,
        MEGATRON,
        "policy.megatron_cfg.tensor_model_parallel_size=8",
        "cluster.cpu_ranks_per_node=8",
        key="policy.megatron_cfg.tensor_model_parallel_size",
        shows=("8", "num_attention_heads", "4"),
        files=_model(),
    ),
    _case(
        "more pipeline stages than layers",
        SFT,
        MODEL,
        "policy.dtensor_cfg.pipeline_parallel_size=4",
        "cluster.cpu_ranks_per_node=4",
        key="policy.dtensor_cfg.pipeline_parallel_size",
        shows=("4", "2 layers"),
        files=_model(),
    ),
    _case(
        "more pipeline stages than layers, on Megatron",
        SFT,
        MODEL,
        MEGATRON,
        "policy.megatron_cfg.pipeline_model_parallel_size=4",
        "cluster.cpu_ranks_per_node=4",
        key="policy.megatron_cfg.pipeline_model_parallel_size",
        shows=("4", "2 layers"),
        files=_model(),
    ),
    _case(
        "experts of a model that has none",
        SFT,
        MODEL,
        "policy.dtensor_cfg.expert_parallel_size=2",
        key="policy.dtensor_cfg.expert_parallel_size",
        shows=("2", "experts"),
        files=_model(),
    ),
    _case(
        "replicas that do not divide",
        GRPO,
        "cluster.device=cuda",
        "cluster.gpus_per_node=8",
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        key="policy.generation.vllm_cfg.tensor_parallel_size",
        got=3,
        shows=("8 GPUs", "3 GPUs"),
    ),
    _case(
        "a replica that does not divide the model",
        GRPO,
        MODEL,
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        key="policy.generation.vllm_cfg.tensor_parallel_size",
        shows=("3", "4 attention heads"),
        files=_model(),
    ),
    _case(
        "generation that leaves no device for policy",
        GRPO,
        "policy.generation.colocated.enabled=false",
        "cluster.cpu_ranks_per_node=4",
        key="policy.generation.colocated.resources.gpus_per_node",
        shows=("cluster.cpu_ranks_per_node=4", "policy.generation.colocated.resources.gpus_per_node=2"),
    ),
    _case(
        "devices for generation that shares the policy's",
        GRPO,
        "policy.generation.colocated.resources.gpus_per_node=1",
        key="policy.generation.colocated.resources.gpus_per_node",
        got=1,
        shows=("policy.generation.colocated.enabled=false",),
    ),
    _case("CUDA without a GPU", SFT, "cluster.device=cuda", shows=("cluster.device", "no GPU", "cpu or auto")),
    _case("nodes without a cluster", SFT, "cluster.num_nodes=2", shows=("cluster.num_nodes", "RAY_ADDRESS")),
)

_TOGETHER = (
    _case(
        "a file of an agent that does not exist",
        GRPO,
        "grpo.agent={command: [python, x.py], place: environment, files: [x.py]}",
        key="grpo.agent.files",
        got=["x.py"],
        shows=("x.py cannot be read",),
    ),
    _case(
        "a grace period for an agent in a sandbox",
        GRPO,
        "grpo.agent={command: [python, x.py], place: environment, grace_s: 1}",
        key="grpo.agent.grace_s",
        shows=("grpo.agent.place",),
    ),
    _case(
        "an agent in a sandbox that cannot limit its network",
        GRPO,
        "env.repository.sandbox.isolation=landlock",
        key="env.repository.sandbox.isolation",
        got="landlock",
        shows=("namespaces", "sandbox.url"),
    ),
    _case(
        "sequence parallel over one rank",
        SFT,
        "policy.dtensor_cfg.sequence_parallel=true",
        key="policy.dtensor_cfg.sequence_parallel",
        shows=("tensor_parallel_size",),
    ),
    _case(
        "sequence parallel over one rank, on Megatron",
        SFT,
        MEGATRON,
        "policy.megatron_cfg.sequence_parallel=true",
        key="policy.megatron_cfg.sequence_parallel",
        shows=("tensor_model_parallel_size",),
    ),
    _case(
        "packing and dynamic batching",
        SFT,
        "policy.sequence_packing.enabled=true",
        "policy.dynamic_batching.enabled=true",
        key="policy.dynamic_batching.enabled",
        shows=("sequence_packing.enabled=false",),
    ),
    _case(
        "an optimizer by its short name",
        SFT,
        "policy.optimizer.name=AdamW",
        key="policy.optimizer.name",
        shows=("torch.optim.AdamW",),
    ),
    _case(
        "a schedule by its short name",
        SFT,
        "policy.scheduler=[{name: cosine}]",
        key="policy.scheduler[0].name",
        shows=("torch.optim.lr_scheduler.",),
    ),
    _case(
        "schedules without milestones",
        SFT,
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR}, {name: torch.optim.lr_scheduler.ConstantLR}]",
        key="policy.scheduler",
        shows=("milestones", "2", "0"),
    ),
    _case(
        "a temperature that vLLM refuses",
        GRPO,
        "policy.generation.temperature=5",
        key="policy.generation.temperature",
        shows=("0.01", "2.0", "5"),
    ),
    _case("min-p above 1", GRPO, "policy.generation.min_p=2", key="policy.generation.min_p", got=2),
    _case(
        "an engine argument that follows from elsewhere",
        GRPO,
        "policy.generation.vllm_cfg.vllm_kwargs={dtype: half}",
        key="policy.generation.vllm_cfg.vllm_kwargs.dtype",
        shows=("policy.precision",),
    ),
    _case(
        "a key of the loss in version 0.1.0",
        GRPO,
        "loss_fn.truncated_importance_sampling_ratio=2",
        key="loss_fn.truncated_importance_sampling_ratio",
        shows=("command line", "loss_fn.importance.high"),
    ),
    _case(
        "validation without data",
        GRPO,
        NO_VALIDATION,
        "grpo.val_period=5",
        key="grpo.val_period",
        shows=("command line", "data.validation"),
    ),
    _case(
        "validation of SFT without data",
        SFT,
        NO_VALIDATION,
        "sft.stop_at_validation_loss=0.1",
        key="sft.stop_at_validation_loss",
        shows=("data.validation",),
    ),
    _case(
        "checkpoints ranked by a validation without data",
        SFT,
        NO_VALIDATION,
        "checkpointing.metric_name=val:loss",
        key="checkpointing.metric_name",
        got="val:loss",
        shows=("command line",),
    ),
    _case(
        "a goal without a threshold",
        GRPO,
        "grpo.stop_at_validation_metric=accuracy",
        key="grpo.stop_at_validation_metric",
        shows=("stop_at_validation_threshold",),
    ),
    _case("environments of SFT", SFT, "data.default.env_name=math", key="data.default.env_name"),
    _case(
        "a time limit in another form",
        GRPO,
        "checkpointing.checkpoint_must_save_by=4h",
        key="checkpointing.checkpoint_must_save_by",
        shows=("4h", "DD:HH:MM:SS"),
    ),
    _case(
        "a push without a protocol",
        SFT,
        "checkpointing.push_to=me/model",
        key="checkpointing.push_to",
        shows=("hf://OWNER/NAME",),
    ),
    _case(
        "a profile of steps in the wrong order",
        SFT,
        "profiling.steps=[7,5]",
        key="profiling.steps",
        got=[7, 5],
        allowed="[FIRST, LAST]",
    ),
    _case(
        "tools of a profile without steps",
        SFT,
        "profiling.tools=[torch]",
        "profiling.ranks=[1]",
        key="profiling.ranks",
        shows=("profiling.steps",),
    ),
    _case(
        "a memory history without a GPU",
        SFT,
        "cluster.device=cpu",
        "profiling={steps: [1, 1], tools: [memory]}",
        key="profiling.tools",
        got="memory",
        shows=("CUDA allocator", "cpu", "py-spy"),
    ),
    _case(
        "nsys where it is not installed",
        SFT,
        "cluster.device=cpu",
        "profiling={steps: [1, 1], tools: [nsys]}",
        key="profiling.tools",
        got="nsys",
        shows=("PATH", "nsight-systems-cli"),
    ),
    _case(
        "a rank that no worker has",
        GRPO,
        "cluster.device=cpu",
        "profiling={steps: [1, 1], ranks: [0, 5]}",
        key="profiling.ranks",
        got=5,
        allowed="0 to 1",
    ),
    _case(
        "a push of the best without a metric",
        SFT,
        "checkpointing.push_to=hf://me/model",
        "checkpointing.push_checkpoints=best",
        key="checkpointing.push_checkpoints",
        got="best",
        shows=("checkpointing.metric_name",),
    ),
    _case(
        "a push of adapters that do not train",
        SFT,
        "checkpointing.push_to=hf://me/model",
        "checkpointing.push_adapter=true",
        key="checkpointing.push_adapter",
        got=True,
        shows=("policy.lora_cfg.enabled",),
    ),
    _case(
        "a way of pushing nothing",
        SFT,
        "checkpointing.push_private=false",
        key="checkpointing.push_private",
        shows=("checkpointing.push_to",),
    ),
    _case(
        "a metric that nothing records",
        GRPO,
        "checkpointing.metric_name=val:acuracy",
        key="checkpointing.metric_name",
        got="val:acuracy",
        allowed="val/accuracy",
        shows=("val/accuracy?",),
    ),
    _case(
        "a metric of a validation that is off",
        SFT,
        "checkpointing.metric_name=val:loss",
        NO_VALIDATION,
        "sft.val_period=0",
        "sft.stop_at_validation_loss=null",
        key="checkpointing.metric_name",
        got="val:loss",
    ),
)

_RUN_DIRECTORIES = (
    _case("foreign run directory", SFT, *RUN, shows=("run ", "thesis.tex"), files=_both(_model(), _foreign)),
    _case("busy run directory", SFT, *RUN, shows=(f"process {os.getpid()}",), files=_busy),
    _case(
        "run directory of another config",
        SFT,
        *RUN,
        shows=("sft.seed: 7 -> 42", "no checkpoint"),
        files=_run_of("sft.seed=7"),
    ),
    _case("--fresh on an earlier run", SFT, *RUN, "--fresh", shows=("run ", "--fresh"), files=_run_of()),
    _case(
        "a file for a run directory", SFT, *RUN, shows=("run ", "is a file"), files=_both(_model(), _text("", "run"))
    ),
    _case(
        "a file above the run directory",
        SFT,
        *RUN[:-1],
        "run_dir=file/run",
        shows=("run ", "/file is a file"),
        files=_both(_model(), _text("", "file")),
    ),
    _case(
        "a run directory in a place that cannot be written",
        SFT,
        *RUN[:-1],
        "run_dir=/proc/run",
        shows=("/proc/run", "run_dir"),
        files=_model(),
    ),
    _case(
        "a branch of a run without a checkpoint",
        SFT,
        *RUN[:-1],
        "--from",
        "run",
        shows=("run ", "checkpoint"),
        files=_run_of(),
    ),
    _case(
        "a branch of what is no run", SFT, *RUN[:-1], "--from", "model", shows=("model ", "run.json"), files=_model()
    ),
)

CASES = (*_SPELLING, *_TEXT, *_PLUGINS, *_DATA, *_MODELS, *_SIZES, *_TOGETHER, *_RUN_DIRECTORIES)
