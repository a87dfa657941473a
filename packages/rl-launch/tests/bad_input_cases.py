"""What a user can get wrong before a run starts: arguments of `rl train`, files around them, and what is said."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SFT, GRPO = "sft-arithmetic", "grpo-arithmetic"
QUESTION = {"messages": [{"role": "user", "content": "1+2="}], "answer": "3", "environment": "math"}

Files = Callable[[Path], object]
"""Writes what a case needs into the folder that the command runs in; what it returns lives as long as the command."""


@dataclass(frozen=True)
class Case:
    """A wrong command.

    Args:
        name: what is wrong with it.
        arguments: of `rl train`.
        message: pattern of what is said.
        files: beside it.
    """

    name: str
    arguments: tuple[str, ...]
    message: str
    files: Files = lambda folder: None


def _case(name: str, *arguments: str, says: str, files: Files = lambda folder: None) -> Case:
    return Case(name, arguments, says, files)


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
        from rl_launch.session import RunDirectory

        _model()(folder)
        directory = RunDirectory(folder / "run")
        directory.open(read_plan(SFT, (*RUN, *overrides)).config)
        directory.close()

    return write


def _busy(folder: Path) -> object:
    from rl_launch.session.directory.lock import DirectoryLock

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
    _case(
        "unknown key", GRPO, "grpo.sede=1", says=r"grpo\.sede \(command line\): no such key; did you mean grpo\.seed\?"
    ),
    _case("unknown section", GRPO, "grop.seed=1", says=r"grop \(command line\): no such key; did you mean grpo\?"),
    _case(
        "unknown key in a file",
        "recipe.yaml",
        says=r"grpo\.max_num_step \(recipe\.yaml:4\): no such key; did you mean grpo\.max_num_steps\?",
        files=_recipe("grpo:", "  seed: 1", "  max_num_step: 3"),
    ),
    _case(
        "callback with a misspelled hook",
        SFT,
        "callbacks=[{type: mine.py:Mine, on_error: stop}]",
        says=r"callbacks\[0\]\.type \(command line\): .*Mine has a method on_stpe.*did you mean on_step",
        files=_text("from rl_core import Callback\nclass Mine(Callback):\n    def on_stpe(self): ...\n", "mine.py"),
    ),
    _case("wrong type", GRPO, "grpo.seed=many", says=r'grpo\.seed \(command line\): got "many"; allowed: int'),
    _case("fraction for a count", SFT, "sft.max_num_steps=1.5", says=r"got 1\.5; allowed: int > 0"),
    _case("negative number", GRPO, "grpo.num_prompts_per_step=-1", says="got -1; allowed: int > 0"),
    _case("zero where it means nothing", GRPO, "checkpointing.keep_top_k=0", says="allowed: int > 0 or null"),
    _case("a choice that there is not", GRPO, "policy.precision=float16", says="one of: float32, bfloat16"),
    _case("text for a switch", GRPO, "grpo.val_at_start=yes", says="allowed: true or false; write true"),
    _case(
        "a value for a section", GRPO, "policy.optimizer=adam", says=r"set the keys below it, policy\.optimizer\.KEY"
    ),
    _case("two things wrong", GRPO, "grpo.seed=x", "grpo.sede=1", says="2 problems in"),
    _case("generation where nothing is generated", SFT, "policy.generation.top_p=1", says=r"policy\.generation"),
)

_TEXT = (
    _case(
        "duplicated key",
        "recipe.yaml",
        says=r"recipe\.yaml:4: the key grpo\.seed is there twice, first in line 3; keep one",
        files=_recipe("grpo:", "  seed: 1", "  seed: 2"),
    ),
    _case("broken YAML", "recipe.yaml", says=r"recipe\.yaml:3: not valid YAML", files=_recipe("grpo: {seed: 1")),
    _case("tabs", "recipe.yaml", says="indent with spaces", files=_recipe("grpo:", "\tseed: 1")),
    _case("a list for a recipe", "recipe.yaml", says="must hold `key: value` lines", files=_text("- grpo\n")),
    _case("a file that is no text", "recipe.yaml", says="not a text file in UTF-8", files=_text(b"\xff\xfe\x00g")),
    _case("YAML tag", "recipe.yaml", says="the tag !!python/name is not allowed", files=_recipe("x: !!python/name y")),
    _case("merge key", "recipe.yaml", says="use `defaults:`", files=_recipe("a: &a {seed: 1}", "grpo:", "  <<: *a")),
    _case(
        "a value that must be set",
        "recipe.yaml",
        says=r"policy\.model_name \(recipe\.yaml:3\): is marked \?\?\?; set it",
        files=_recipe("policy:", "  model_name: ???"),
    ),
    _case(
        "interpolation of no key",
        GRPO,
        "grpo.seed=${grpo.sede}",
        says=r"names grpo\.sede, which is not a key here; did you mean",
    ),
    _case(
        "interpolation in a circle",
        GRPO,
        "grpo.val_period=${grpo.max_num_steps}",
        "grpo.max_num_steps=${grpo.val_period}",
        says="leads back to itself",
    ),
    _case("interpolation left open", GRPO, "logger.wandb.project=${grpo.seed", says="not a valid interpolation"),
    _case(
        "unknown defaults", "recipe.yaml", says="there is no recipe 'grpo-maths'", files=_text("defaults: grpo-maths")
    ),
    _case("defaults in a circle", "recipe.yaml", says="go in a circle", files=_text("defaults: ./recipe.yaml\n")),
    _case("unknown recipe", "grpo-arithmatic", says=r"no recipe 'grpo-arithmatic'; did you mean grpo-arithmetic\?"),
    _case("missing recipe file", "mine.yaml", says=r"there is no file mine\.yaml"),
    _case("override without =", GRPO, "grpo.seed", says="an override is written key=value"),
    _case("override in the recipe's place", "grpo.seed=1", says=r"write rl train RECIPE grpo\.seed=1"),
    _case("override with a mark", GRPO, "+grpo.seed=1", says=r"write key=value without '\+'"),
    _case(
        "override of an entry that is not there", GRPO, "data.train[3].split=x", says=r"\[3\] addresses a list entry"
    ),
    _case("unclosed list in an override", GRPO, "policy.generation.stop_strings=[a", says="not valid YAML"),
)

_PLUGINS = (
    _case(
        "unknown algorithm",
        GRPO,
        "algorithm=grop",
        says=r"algorithm \(command line\): got 'grop'; did you mean grpo\?; installed algorithms: ",
    ),
    _case(
        "no algorithm",
        "recipe.yaml",
        says="algorithm .*must be set; installed algorithms: ",
        files=_text("policy: {}\n"),
    ),
    _case(
        "unknown generation backend",
        GRPO,
        "policy.generation.backend=vlm",
        says="policy.generation.backend .*did you mean vllm",
    ),
    _case(
        "two training backends",
        GRPO,
        "policy.dtensor_cfg.enabled=true",
        MEGATRON,
        says="are both true; a model has one backend: enable only one of them",
    ),
    _case(
        "no training backend", GRPO, "policy.dtensor_cfg.enabled=false", says="no training backend is enabled; set one"
    ),
    _case(
        "unknown environment",
        GRPO,
        "data.default.env_name=maths",
        says=r"data\.default\.env_name .*no environment 'maths' is installed; did you mean math\?",
    ),
    _case(
        "a row with an unknown environment",
        GRPO,
        ROWS,
        says=r"rows\.jsonl, line 2: no environment 'mth' is installed; did you mean math\?",
        files=_rows(QUESTION, {**QUESTION, "environment": "mth"}),
    ),
    _case(
        "a row without an environment",
        GRPO,
        ROWS,
        says=r"rows\.jsonl, line 1: the row names no environment to score it; set `env_name`",
        files=_rows({"messages": "1+2="}),
    ),
    _case(
        "unknown dataset",
        SFT,
        "data.train={dataset_name: arithmetc}",
        says=r"no dataset 'arithmetc' is installed; did you mean arithmetic\? Installed are arithmetic",
    ),
    _case(
        "unknown dataset with settings",
        SFT,
        "data.train.dataset_name=arithmetc",
        "data.train.settings.max_operand=9",
        says=r"'arithmetc' is not one of them: arithmetic, .*did you mean arithmetic\?",
    ),
    _case(
        "unknown setting of a dataset",
        SFT,
        "data.train.settings={max_operant: 9}",
        says="settings of the dataset 'arithmetic': max_operant: no such setting",
    ),
    _case("unknown split", SFT, "data.train.split=dev", says="has the splits train and validation, got 'dev'"),
    _case("unknown processor", SFT, "data.train.processor=gsm", says=r"no processor 'gsm'; did you mean gsm8k\?"),
    _case("a processor that is not there", SFT, "data.train.processor=mine:rows", says="cannot be imported"),
    *(
        _case(
            f"{extra} without its extra",
            SFT,
            f"logger.{extra}_enabled=true",
            says=rf"{extra} is not installed: (uv )?pip install 'rl-launch\[{extra}\]'",
        )
        for extra in ("wandb", "mlflow")
        if importlib.util.find_spec(extra) is None
    ),
)

_DATA = (
    _case("missing data file", SFT, ROWS, says=r"no data at 'rows\.jsonl': expected a file, a folder or a pattern"),
    _case(
        "malformed JSONL line",
        SFT,
        ROWS,
        says=r"rows\.jsonl, line 2: not a JSON object: Expecting value at column 14",
        files=_text(json.dumps(QUESTION) + '\n{"messages": \n', "rows.jsonl"),
    ),
    _case("a JSONL row that is a list", SFT, ROWS, says=r"line 1: a row must be a JSON object", files=_rows([1])),
    _case(
        "missing column",
        SFT,
        "data.train={data_path: rows.jsonl, input_key: qestion}",
        says=r"rows\.jsonl, line 1: no column 'qestion'; did you mean question\?; the columns are",
        files=_rows({"question": "1+2=", "answer": "3"}),
    ),
    _case("empty dataset", SFT, ROWS, says=r"the dataset 'rows\.jsonl' has no rows; check", files=_rows()),
    _case(
        "a kind of file that cannot be read",
        SFT,
        "data.train={data_path: rows.txt}",
        says=r"cannot read 'rows\.txt': expected \.jsonl",
        files=_text("a,b\n", "rows.txt"),
    ),
    _case(
        "a dataset by name and by path",
        SFT,
        "data.train.data_path=rows.jsonl",
        "data.train.dataset_name=arithmetic",
        says=r"data\.train .*got both of `dataset_name` and `data_path`; give exactly one",
    ),
    _case("a dataset by nothing", SFT, "data.train={}", says="got neither of `dataset_name` and `data_path`"),
    _case("no dataset in the list", SFT, "data.train=[]", says="got an empty list"),
    _case(
        "weights for some datasets",
        SFT,
        "data.train=[{dataset_name: arithmetic, weight: 1.0}, {dataset_name: arithmetic}]",
        says="set it for all or for none",
    ),
    _case("more rows than there are", SFT, "data.train.settings={max_operand: 9, num_rows: 900}", says="ask for fewer"),
    _case("missing prompt file", SFT, "data.default.prompt_file=p.txt", says="prompt_file 'p.txt' cannot be read"),
    _case(
        "a prompt file without a place for the input",
        SFT,
        "data.default.prompt_file=p.txt",
        says="has no placeholder",
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
        says=r"rows\.jsonl, line 1: the conversation has no assistant message to learn from",
        files=_both(_model(), _rows({"messages": "1+2="})),
    ),
    _case(
        "prompts longer than the limit",
        GRPO,
        ROWS,
        MODEL,
        says=r"1 of 1 rows have more than 24 tokens; the longest \(rows\.jsonl, line 1\) has .* raise data\.max",
        files=_both(_model(), _rows({**QUESTION, "messages": "1+" * 40})),
    ),
)

_MODELS = (
    _case(
        "missing model folder", SFT, MODEL, says=r"policy\.model_name \(command line\): folder './model' does not exist"
    ),
    _case(
        "a model neither here nor on a hub that may be asked",
        SFT,
        "policy.model_name=no-such/model",
        says=r"policy\.model_name: 'no-such/model' is not a local folder, .*HF_HUB_OFFLINE is set.*hf download",
    ),
    _case("a path that is taken for no hub name", SFT, "policy.model_name=a/b/c", says="folder 'a/b/c' does not exist"),
    _case(
        "adapters on layers that the model does not have",
        SFT,
        MODEL,
        "policy.lora_cfg={enabled: true, match_all_linear: false, target_modules: [q_projj]}",
        says=r"policy\.lora_cfg\.target_modules .*got q_projj, which matches no layer of .* mean q_proj\?; it has ",
        files=_model(),
    ),
    _case(
        "an argument that the optimizer does not take",
        SFT,
        "policy.optimizer.kwargs={lr: 1e-3, weight_decy: 0.1}",
        says=r"policy\.optimizer\.kwargs\.weight_decy .*no such argument; did you mean weight_decay\?; allowed: ",
    ),
    _case(
        "an argument that the schedule does not take",
        SFT,
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_steps: 9}}]",
        says=r"policy\.scheduler\[0\]\.kwargs\.total_steps .*LinearLR has no such argument",
    ),
    _case("model folder without config.json", SFT, MODEL, says=r"no config\.json \(it", files=_model("config.json")),
    _case(
        "model folder without weights",
        SFT,
        MODEL,
        says=r"no model\.safetensors or model\.safetensors\.index\.json .*save_pretrained",
        files=_model("model.safetensors"),
    ),
    _case(
        "model folder without a tokenizer",
        SFT,
        MODEL,
        says=r"no tokenizer\.json .*policy\.tokenizer\.name",
        files=_model("tokenizer.json"),
    ),
    _case(
        "config.json that is not JSON", SFT, MODEL, says="is not a valid Hugging Face config", files=_model(config="{")
    ),
    _case("missing tokenizer folder", SFT, "policy.tokenizer.name=./words", says="folder './words' does not exist"),
    _case(
        "tokenizer without a chat template",
        SFT,
        MODEL,
        says=r"has no chat template; set policy\.tokenizer\.chat_template to",
        files=_model(template=False),
    ),
    _case(
        "tokenizer without an end of sequence",
        SFT,
        MODEL,
        says="has no end-of-sequence token, .* set `eos_token`",
        files=_model(eos=False),
    ),
    _case(
        "missing template file",
        SFT,
        "policy.tokenizer.chat_template=chat.jinja",
        says=r"'chat\.jinja' is neither a Jinja template \(it has no braces\) nor a file that can be read",
    ),
    _case(
        "a template variable with no name",
        SFT,
        "policy.tokenizer.chat_template_kwargs={a-b: 1}",
        says="'a-b' is not a valid variable name",
    ),
)

_SIZES = (
    _case(
        "batch sizes that do not divide",
        GRPO,
        "policy.train_global_batch_size=100",
        says=r"100 does not divide the 512 rollouts of a step \(grpo\.num_prompts_per_step 64 x",
    ),
    _case("a group of one", GRPO, "grpo.num_generations_per_prompt=1", says="a group needs at least 2 rollouts"),
    _case("no room for a prompt", GRPO, "policy.generation.max_new_tokens=32", says="leaves no room for a prompt"),
    _case(
        "max_model_len too small",
        GRPO,
        "policy.generation.vllm_cfg.max_model_len=6",
        says="6 tokens leave no room for a prompt beside max_new_tokens=8; raise it",
    ),
    _case("max_input_seq_length too large", SFT, "data.max_input_seq_length=64", says="lower it, or remove it"),
    _case(
        "a mesh that the ranks do not fill",
        SFT,
        "policy.dtensor_cfg.tensor_parallel_size=3",
        says="2 ranks are not a multiple of the 3 .*lower its parallel sizes",
    ),
    _case(
        "a mesh that the ranks do not fill, on Megatron",
        SFT,
        MEGATRON,
        "policy.megatron_cfg.pipeline_model_parallel_size=3",
        says="the policy's 2 ranks are not a multiple of the 3 .*lower its parallel sizes",
    ),
    _case(
        "a mesh that does not divide the model",
        SFT,
        MODEL,
        "policy.dtensor_cfg.tensor_parallel_size=8",
        "cluster.cpu_ranks_per_node=8",
        says=r"8 does not divide the model's 4 attention heads; set it to 4",
        files=_model(),
    ),
    _case(
        "a mesh that does not divide the model, on Megatron",
        SFT,
        MODEL,
        MEGATRON,
        "policy.megatron_cfg.tensor_model_parallel_size=8",
        "cluster.cpu_ranks_per_node=8",
        says=r"8 does not divide the model's num_attention_heads \(4\); set it to a divisor",
        files=_model(),
    ),
    _case(
        "more pipeline stages than layers",
        SFT,
        MODEL,
        "policy.dtensor_cfg.pipeline_parallel_size=4",
        "cluster.cpu_ranks_per_node=4",
        says="4 stages .* of 2 layers leave some empty; have at most 2",
        files=_model(),
    ),
    _case(
        "more pipeline stages than layers, on Megatron",
        SFT,
        MODEL,
        MEGATRON,
        "policy.megatron_cfg.pipeline_model_parallel_size=4",
        "cluster.cpu_ranks_per_node=4",
        says="4 stages .* of 2 layers leave some empty; have at most 2",
        files=_model(),
    ),
    _case(
        "experts of a model that has none",
        SFT,
        MODEL,
        "policy.dtensor_cfg.expert_parallel_size=2",
        says="is 2 and the model has no experts; set it to 1",
        files=_model(),
    ),
    _case(
        "replicas that do not divide",
        GRPO,
        "cluster.device=cuda",
        "cluster.gpus_per_node=8",
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        says="8 GPUs per node cannot be divided into replicas of 3; set the generator's parallel sizes",
    ),
    _case(
        "a replica that does not divide the model",
        GRPO,
        MODEL,
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        says="3 does not divide the model's 4 attention heads",
        files=_model(),
    ),
    _case(
        "generation that leaves no device for policy",
        GRPO,
        "policy.generation.colocated.enabled=false",
        "cluster.cpu_ranks_per_node=4",
        says=r"is unset, so with policy\.generation\.colocated\.enabled=false generation takes all 4 of "
        r"cluster\.cpu_ranks_per_node, which leaves no device for policy; set "
        r"policy\.generation\.colocated\.resources\.gpus_per_node=2",
    ),
    _case(
        "devices for generation that shares the policy's",
        GRPO,
        "policy.generation.colocated.resources.gpus_per_node=1",
        says=r"colocated generation uses the policy's devices .*set policy\.generation\.colocated\.enabled=false",
    ),
    _case("CUDA without a GPU", SFT, "cluster.device=cuda", says="no GPU .*; set cluster.device to cpu or auto"),
    _case("nodes without a cluster", SFT, "cluster.num_nodes=2", says="RAY_ADDRESS is not set; start Ray on"),
)

_TOGETHER = (
    _case(
        "sequence parallel over one rank",
        SFT,
        "policy.dtensor_cfg.sequence_parallel=true",
        says="shares tokens over tensor-parallel ranks and there is one; set tensor_parallel_size=2",
    ),
    _case(
        "sequence parallel over one rank, on Megatron",
        SFT,
        MEGATRON,
        "policy.megatron_cfg.sequence_parallel=true",
        says=r"spreads tokens .* of which there is one; set megatron_cfg\.tensor_model_parallel_size",
    ),
    _case(
        "packing and dynamic batching",
        SFT,
        "policy.sequence_packing.enabled=true",
        "policy.dynamic_batching.enabled=true",
        says="are both enabled; set sequence_packing.enabled=false in the same section",
    ),
    _case("an optimizer by its short name", SFT, "policy.optimizer.name=AdamW", says=r"such as torch\.optim\.AdamW"),
    _case(
        "a schedule by its short name", SFT, "policy.scheduler=[{name: cosine}]", says="dotted name of a class, such as"
    ),
    _case(
        "schedules without milestones",
        SFT,
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR}, {name: torch.optim.lr_scheduler.ConstantLR}]",
        says="2 schedules need 1 milestones in an entry of their own, got 0",
    ),
    _case(
        "a temperature that vLLM refuses", GRPO, "policy.generation.temperature=5", says=r"from 0\.01 to 2\.0, got 5"
    ),
    _case("min-p above 1", GRPO, "policy.generation.min_p=2", says=r"policy\.generation\.min_p"),
    _case(
        "an engine argument that follows from elsewhere",
        GRPO,
        "policy.generation.vllm_cfg.vllm_kwargs={dtype: half}",
        says=r"vllm_kwargs\.dtype .*cannot be set here: write `policy\.precision`",
    ),
    _case(
        "a key of the loss in version 0.1.0",
        GRPO,
        "loss_fn.truncated_importance_sampling_ratio=2",
        says=r"loss_fn\.truncated_importance_sampling_ratio \(command line\): is now loss_fn\.importance\.high",
    ),
    _case(
        "validation without data",
        GRPO,
        NO_VALIDATION,
        "grpo.val_period=5",
        says=r"grpo\.val_period \(command line\): got 5, but there is nothing to validate on; give data\.validation",
    ),
    _case(
        "validation of SFT without data",
        SFT,
        NO_VALIDATION,
        "sft.stop_at_validation_loss=0.1",
        says="there is nothing to validate on",
    ),
    _case(
        "checkpoints ranked by a validation without data",
        SFT,
        NO_VALIDATION,
        "checkpointing.metric_name=val:loss",
        says=r"checkpointing\.metric_name \(command line\): nothing records 'val/loss'; this run does not validate",
    ),
    _case(
        "a goal without a threshold",
        GRPO,
        "grpo.stop_at_validation_metric=accuracy",
        says="needs stop_at_validation_threshold",
    ),
    _case("environments of SFT", SFT, "data.default.env_name=math", says="scores nothing; remove this key"),
    _case(
        "a time limit in another form",
        GRPO,
        "checkpointing.checkpoint_must_save_by=4h",
        says="got '4h'; allowed: DD:HH:MM:SS, such as 00:03:45:00",
    ),
    _case("a push without a protocol", SFT, "checkpointing.push_to=me/model", says="allowed: hf://OWNER/NAME"),
    _case(
        "a push of the best without a metric",
        SFT,
        "checkpointing.push_to=hf://me/model",
        "checkpointing.push_checkpoints=best",
        says=r"push_checkpoints \(command line\): got best, but checkpointing\.metric_name.* is not set",
    ),
    _case(
        "a push of adapters that do not train",
        SFT,
        "checkpointing.push_to=hf://me/model",
        "checkpointing.push_adapter=true",
        says=r"push_adapter \(command line\): pushes adapters, but policy\.lora_cfg\.enabled is false",
    ),
    _case("a way of pushing nothing", SFT, "checkpointing.push_private=false", says=r"has no effect without .*push_to"),
    _case(
        "a metric that nothing records",
        GRPO,
        "checkpointing.metric_name=val:acuracy",
        says=r"nothing records 'val/acuracy'; did you mean val/accuracy\?",
    ),
    _case(
        "a metric of a validation that is off",
        SFT,
        "checkpointing.metric_name=val:loss",
        NO_VALIDATION,
        "sft.val_period=0",
        "sft.stop_at_validation_loss=null",
        says="nothing records 'val/loss'; this run does not validate; null keeps the newest checkpoints",
    ),
)

_RUN_DIRECTORIES = (
    _case(
        "foreign run directory",
        SFT,
        *RUN,
        says=r"holds files that do not belong to a run \(thesis\.tex\)",
        files=_both(_model(), _foreign),
    ),
    _case("busy run directory", SFT, *RUN, says=r"run is in use by process \d+ on .*Wait for it", files=_busy),
    _case(
        "run directory of another config",
        SFT,
        *RUN,
        says=r"run holds a run with another config:\s+needs a branch  sft\.seed: 7 -> 42\s.*no checkpoint",
        files=_run_of("sft.seed=7"),
    ),
    _case(
        "--fresh on an earlier run",
        SFT,
        *RUN,
        "--fresh",
        says="is not empty, and --fresh needs an empty folder",
        files=_run_of(),
    ),
    _case(
        "a file for a run directory",
        SFT,
        *RUN,
        says="run cannot be made: it is a file",
        files=_both(_model(), _text("", "run")),
    ),
    _case(
        "a file above the run directory",
        SFT,
        *RUN[:-1],
        "run_dir=file/run",
        says=r"run cannot be made: \S*/file is a file",
        files=_both(_model(), _text("", "file")),
    ),
    _case(
        "a run directory in a place that cannot be written",
        SFT,
        *RUN[:-1],
        "run_dir=/proc/run",
        says=r"/proc/run cannot be made in /proc: .* Choose another run_dir",
        files=_model(),
    ),
    _case(
        "a branch of a run without a checkpoint",
        SFT,
        *RUN[:-1],
        "--from",
        "run",
        says="run has no checkpoint",
        files=_run_of(),
    ),
    _case(
        "a branch of what is no run", SFT, *RUN[:-1], "--from", "model", says="is not a run directory", files=_model()
    ),
)

CASES = (*_SPELLING, *_TEXT, *_PLUGINS, *_DATA, *_MODELS, *_SIZES, *_TOGETHER, *_RUN_DIRECTORIES)
