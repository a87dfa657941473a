"""Settings of a model and of generation that mean the same for every backend."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from rl_core.config import (
    Config,
    EnvVars,
    PathText,
    Problem,
    ProblemError,
    Rename,
    WhenChanged,
    did_you_mean,
    nearest_as_remedy,
)
from rl_core.devices import Device
from rl_core.facts.hf_config import image_token, language_fields, with_overrides
from rl_core.facts.optimizer_arguments import (
    NUMBERS,
    OPTIMIZERS,
    PAIRS,
    REQUIRED,
    SCHEDULES,
    UNSUPPORTED,
    UNSUPPORTED_SCHEDULES,
)
from rl_core.token_filter import TokenFilter
from rl_core.weights import WeightSyncChoice, WeightSyncEncoding

_DATE_CODES = ("%d", "%-d", "%e", "%m", "%-m", "%b", "%B", "%Y", "%y", "%a", "%A", "%j", "%F", "%H", "%M", "%S")
"""Codes of `strftime` that chat templates may use."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _dotted(example: str, known: Collection[str]) -> Callable[[str | None], str | None]:
    """Return a validator of the dotted name of a class, which suggests one of the known names."""

    def check(name: str | None) -> str | None:
        if name is not None and not _DOTTED.fullmatch(name):
            meant = nearest_as_remedy(f"{example.rpartition('.')[0]}.{name}", known)
            allowed = f"dotted name of a class, such as {example}"
            raise ProblemError(Problem("", got=name, allowed=allowed, remedy=meant))
        return name

    return check


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without those that are null, which a recipe sets and its heir takes back. A learning rate is
    always a number."""
    return {name: value for name, value in given.items() if value is not None or name == "lr"}


Arguments = Annotated[dict[str, Any], AfterValidator(_without_nulls)]
"""Arguments of a class by name."""


class BackendConfig(Config):
    """Base of a training backend's settings."""

    enabled: Annotated[bool | None, WhenChanged.NEW_RUN] = None
    """Train with this backend. A model trains with exactly one backend: dtensor, if none is enabled."""

    @property
    def reduced_precision(self) -> str:
        """Key and value, relative to the model's section, that reduce the precision of training below
        `policy.precision`; empty if none does."""
        return ""


def _recompute(_: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    is_on = section.get("activation_checkpointing")
    if is_on is None:
        return {}
    return {"recompute": section.get("recompute_granularity", "full") if is_on else "none"}


RECOMPUTE_KEYS: Mapping[str, Rename] = {
    "activation_checkpointing": Rename("recompute: full if true, none if false", _recompute),
    "recompute_granularity": Rename("recompute", _recompute),
}
"""Keys that `recompute` of a training backend had in version 0.1.0."""


class EngineConfig(Config):
    """Base of a generation engine's settings."""

    @property
    def reduced_precision(self) -> str:
        """Key and value, relative to `policy.generation`, that reduce the engine's precision below `policy.precision`;
        empty if none does."""
        return ""


class TokenizerConfig(Config):
    """Tokenizer and chat template of a model."""

    before_it_existed: ClassVar[Mapping[str, Any]] = {"split_special_tokens": "none"}

    name: PathText | None = None
    """Folder or hub name of the tokenizer; if unset, the model's own."""
    chat_template: PathText | None = None
    """Jinja chat template, or a path to one; if unset, the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables of the chat template."""
    template_date: str = "2025-01-01"
    """Date for chat templates that ask for the current one with `strftime_now`, such as Llama's and gpt-oss's. It is
    fixed, so that rows are the same in every process and after a resume on another day."""
    tool_format: Literal["hermes", "qwen_coder", "llama", "mistral", "deepseek", "glm", "harmony"] | None = None
    """Format of the model's tool calls, for environments with tools; if unset, it is read from the chat template.
    `hermes` is also the format of Qwen2.5 and Qwen3, `harmony` the format of gpt-oss."""
    split_special_tokens: Literal["none", "observations", "all"] = "observations"
    """Content where the string of a special token, such as `<|im_end|>`, is tokenised as ordinary text, so that it
    cannot end a turn or start one with another role: the answers of environments and tools (`observations`), or also
    the messages of datasets except the assistant's (`all`). Tokens that the chat template writes stay special."""

    @field_validator("template_date", mode="before")
    @classmethod
    def _is_date(cls, value: Any) -> str:
        try:
            return date.fromisoformat(str(value)).isoformat()  # YAML reads a date without quotes as such
        except ValueError:
            raise ProblemError(Problem("", got=value, allowed="a date such as 2025-01-31")) from None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.isidentifier():
                reason, remedy = f"{name!r} is not a valid variable name", "Use letters, digits and underscores"
                raise ProblemError(Problem("", reason, remedy=remedy))
        return value

    def with_variables(self, template: Any) -> Any:
        """Return a template, or several by name, with the configured variables set at its top, so that every process
        that applies it renders the same text.
        """
        if isinstance(template, Mapping):
            return {name: self.with_variables(text) for name, text in template.items()}
        # JSON-like Python literals are Jinja literals.
        variables = self.chat_template_kwargs.items()
        return "".join(f"{{% set {name} = {value!r} %}}" for name, value in variables) + template

    def with_date(self, template: Any) -> Any:
        """Return a template, or several by name, whose `strftime_now` writes `template_date`."""
        if isinstance(template, Mapping):
            return {name: self.with_date(text) for name, text in template.items()}
        if template is None or "strftime_now" not in template:
            return template
        day = date.fromisoformat(self.template_date)
        written = "".join(f"|replace({code!r},{day.strftime(code)!r})" for code in _DATE_CODES)
        # A macro takes precedence over the function of the same name that transformers offers.
        return f"{{% macro strftime_now(format) %}}{{{{ format{written} }}}}{{% endmacro +%}}{template}"

    def template_text(self) -> str | None:
        """Return the configured template, read from its file if `chat_template` is a path; None if it is unset.

        Raises:
            ValueError: If it is neither a template nor a file that can be read.
        """
        # Jinja text has braces or line breaks, a path has neither.
        if self.chat_template is None or "{" in self.chat_template or "\n" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{self.chat_template!r} is neither a Jinja template (it has no braces) nor a file that can be read: "
                f"{error.strerror}"
            ) from error


class OptimizerConfig(Config):
    """Optimizer: a torch class and its arguments."""

    name: Annotated[str, WhenChanged.NEW_RUN] = "torch.optim.AdamW"
    """Dotted name of a torch optimizer class."""
    kwargs: Arguments = {"lr": 1e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
    """Arguments of that class, such as the learning rate `lr`. The default of `lr` comes from the algorithm and is ten
    times as high for adapters (`lora_cfg.enabled`). Null removes an argument that a recipe sets."""
    decay_norms_and_biases: bool = True
    """Apply `weight_decay` to every parameter. If false, the parameters of norms and all biases are not decayed, as in
    the Trainer of transformers and TRL; all others are, also one-dimensional ones such as attention sinks."""
    lr_scales: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}
    """Factors of the learning rate by patterns of parameters, which are written as in `policy.freeze`. The first
    pattern that matches a parameter counts; parameters that no pattern matches have a factor of 1. Schedules multiply
    the scaled rates. `{"*.lora_B": 16}` trains adapters as LoRA+ does (arXiv:2402.12354)."""

    _is_dotted = field_validator("name")(_dotted("torch.optim.AdamW", OPTIMIZERS))


class SchedulerConfig(Config):
    """Learning-rate schedule: a torch class and its arguments."""

    name: str | None = None
    """Dotted name of a torch learning-rate schedule class."""
    kwargs: Arguments = {}
    """Arguments of that class; null removes an inherited one."""
    milestones: list[int] | None = None
    """Steps when the next schedule in the list takes over, in a separate entry without `name`."""

    _is_dotted = field_validator("name")(_dotted("torch.optim.lr_scheduler.LinearLR", SCHEDULES))


class SequencePackingConfig(Config):
    """Rows that are packed into microbatches by their numbers of tokens."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = True
    """Put several rows into one microbatch without padding."""
    train_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens in a training microbatch; `train_micro_batch_size x max_total_sequence_length` if
    unset."""
    logprob_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens in a forward-only microbatch; `logprob_batch_size x max_total_sequence_length` if
    unset."""
    shared_prefixes: Literal["auto"] | bool = False
    """Compute tokens that rows begin with in common once for all rows of a microbatch, such as the prompt of a group or
    the history of an agent's segments, where that is at least a tenth of a row. Losses and gradients are those of
    separate rows, up to rounding. Rows with a common prefix go to the same microbatch, in which shared tokens count
    once towards the budget. `auto` does so if the model can; true refuses a model that cannot. rl-dtensor only."""


class DynamicBatchingConfig(Config):
    """Microbatches of padded rows with about the same number of tokens."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = False
    """Pad rows of similar length together up to a token budget."""
    train_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of padded tokens in a training microbatch; the default is the same as for packing."""
    logprob_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of padded tokens in a forward-only microbatch; the default is the same as for packing."""


BaseQuantization = Literal["nf4", "int8"]
"""Format of the frozen weights under adapters."""

BASE_BYTES: Mapping[BaseQuantization, float] = {"nf4": 4.5 / 8, "int8": 8.5 / 8}
"""Bytes of a weight in each format: its code, and its share of the largest value of a block of 64."""


def _check_patterns(value: Any) -> Any:
    for pattern in value if isinstance(value, Mapping) else ():
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return value


Value = TypeVar("Value")
LayerPatterns = Annotated[dict[str, Value], BeforeValidator(_check_patterns)]
"""Values of layers by patterns of their names, as `peft` has them."""


class LoraConfig(Config):
    """Low-rank adapters (LoRA, arXiv:2106.09685): which layers get one, and their size."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.NEW_RUN

    enabled: bool = False
    """Train low-rank adapters on linear layers and leave the base weights unchanged."""
    target_modules: list[str] = []
    """Names, or endings of names, of the linear layers that get an adapter. Used only if `match_all_linear` is
    false."""
    target_parameters: list[str] = []
    """Names, or endings of names, of the stacked weights of experts that get an adapter for each expert, such as
    `experts.gate_up_proj` and `experts.down_proj`, in addition to the linear layers. rl-dtensor only."""
    exclude_modules: list[str] = []
    """Names, or endings of names, of layers and stacked weights that get no adapter."""
    match_all_linear: bool = True
    """Add an adapter to every linear layer except the head, regardless of `target_modules`. Routers get none, experts
    only as `target_parameters` sets, and neither do layers that `peft` refuses for a family."""
    dim: int = Field(default=8, gt=0)
    """Rank of the adapters."""
    alpha: Annotated[float, WhenChanged.BRANCH] = Field(default=32, gt=0)
    """Numerator of the adapters' scale: the product of an adapter is multiplied by `alpha / dim`."""
    use_rslora: Annotated[bool, WhenChanged.BRANCH] = False
    """Scale by `alpha / sqrt(dim)` instead, so that gradients do not shrink as `dim` grows (rsLoRA,
    arXiv:2312.03732)."""
    rank_pattern: LayerPatterns[Annotated[int, Field(gt=0)]] = {}
    """Ranks of some layers, and of some stacked weights of experts, in place of `dim`. A key is a name, an ending of
    names, or a regular expression of either, as in `peft`: `{q_proj: 16, "layers.[01].mlp.up_proj": 4}`. The first key
    that matches a layer counts."""
    alpha_pattern: Annotated[LayerPatterns[Annotated[float, Field(gt=0)]], WhenChanged.BRANCH] = {}
    """Values of `alpha` for some layers, by the same keys. The scale of a layer is computed from its own rank."""
    use_dora: bool = False
    """Train the norm of each row of an adapted weight apart from its direction (DoRA, arXiv:2402.09353): the layer
    computes with `magnitude * V / |V|`, where `V` is the weight with the adapter added and `|V|` the norm of each row,
    through which no gradient flows. rl-dtensor only."""
    init: Literal["default", "pissa"] = "default"
    """Values that new adapters start from. `default`: a random first factor and a second factor of zeros. `pissa`: the
    part of each weight with its `dim` largest singular values, which is taken out of the weight (PiSSA,
    arXiv:2404.02948). The first start and each resume compute the singular values."""
    base_quantization: BaseQuantization | None = None
    """Format in which the frozen weights of linear layers are stored, with or without an adapter (QLoRA,
    arXiv:2305.14314): `nf4` takes 4.5 bits per weight, `int8` 8.5. Embeddings, norms and heads stay in `precision`. A
    layer computes with the dequantised weight, and generators and exports get dequantised weights with the adapters
    merged in, so that rollouts come from the same model. rl-dtensor only; unset, weights have the dtype of
    `precision`."""
    dropout: Annotated[float, WhenChanged.BRANCH] = Field(default=0.0, ge=0, lt=1)
    """Fraction of an adapter's inputs that are dropped in training."""
    adapter: PathText | None = None
    """Folder with an adapter in the format of `peft` to start from, with the same layers, `dim` and scale; if unset,
    new adapters."""
    max_adapters: int = Field(default=1, gt=0)
    """Number of adapters on the same base that are trained at the same time, each on its own rows, with a rank of up to
    `dim`, a scale and an optimizer state of its own (`rl serve tinker`). rl-dtensor only."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's product, unless a pattern sets another rank or alpha."""
        return self.scale_of(self.dim, self.alpha)

    def scale_of(self, dim: int, alpha: float) -> float:
        """Return the factor of the product of an adapter with this rank and alpha."""
        return alpha / (math.sqrt(dim) if self.use_rslora else dim)

    @property
    def max_dim(self) -> int:
        """Largest rank that a layer may have."""
        return max((self.dim, *self.rank_pattern.values()))


PartTraining = Literal["frozen", "trained", "adapters"]
"""How a part of a model trains."""


class VisionConfig(Config):
    """Images: whether a vision-language model sees them, and which of its parts train."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.NEW_RUN

    enabled: bool = False
    """Train and serve a vision-language model with its vision tower, so that conversations may have images. Otherwise
    such a model is trained and served as its language model."""
    tower: PartTraining = "frozen"
    """How the vision tower trains: not at all (`frozen`), with all its weights (`trained`), or with low-rank adapters
    as `lora_cfg` sets them (`adapters`)."""
    projector: PartTraining = "frozen"
    """How the layers between vision tower and language model train, with the same choices."""
    min_pixels: Annotated[int | None, WhenChanged.BRANCH] = Field(default=None, gt=0)
    """Minimum number of pixels: smaller images are enlarged to it; if unset, as the model's image processor sets it."""
    max_pixels: Annotated[int | None, WhenChanged.BRANCH] = Field(default=None, gt=0)
    """Maximum number of pixels: larger images are reduced to it; if unset, as the model's image processor sets it."""
    max_images: Annotated[int, WhenChanged.RESUME] = Field(default=16, gt=0)
    """Maximum number of images in a row."""


class HeadOptimizerConfig(OptimizerConfig):
    """Optimizer of a draft head."""

    kwargs: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
    """Arguments of that class, such as the learning rate `lr`."""


class DraftHeadConfig(Config):
    """EAGLE-3 head (arXiv:2503.01840) or layer for multi-token prediction (arXiv:2412.19437) that learns to draft what
    the policy samples, from its hidden states."""

    model_name: Annotated[PathText, WhenChanged.NEW_RUN]
    """Head to load: the same folder as `generation.vllm_cfg.speculation.model`. A layer for multi-token prediction is
    in the files of the policy's model; it trains in models of the types `deepseek_v3` and `glm4_moe`."""
    num_tokens: Annotated[int, WhenChanged.BRANCH] = Field(default=3, ge=1, le=16)
    """Number of tokens of a draft for which the head is trained. After the first token the head reads hidden states of
    its own, which it learns only if they are trained."""
    max_grad_norm: Annotated[float | None, WhenChanged.BRANCH] = Field(default=1.0, gt=0)
    """Maximum norm of the head's gradients, which are clipped to it; null does not clip."""
    optimizer: HeadOptimizerConfig = HeadOptimizerConfig()


class ModelConfig(Config):
    """A model: its files, tokenizer, batch sizes, precision, optimizer, adapters, and the backend that trains it."""

    has_own_tokens: ClassVar[bool] = False
    """True if its rows have the tokens of its own tokenizer. Otherwise they have the policy's."""

    model_name: Annotated[PathText, WhenChanged.NEW_RUN]
    """Model to load: a folder with Hugging Face files, or a hub name."""
    trust_remote_code: Annotated[str | None, WhenChanged.NEW_RUN] = Field(
        default=None, pattern=r"^sha256:[0-9a-f]{64}$"
    )
    """Digest of the code that comes with the model's files (`auto_map` in its config.json), for a model type that
    `transformers` does not have. The model's workers, and no other processes, run code with this digest. If it is
    unset, no such code is run, and the message has the digest. For `dtensor_cfg` without model parallelism, and `hf`
    generation."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    train_global_batch_size: int = Field(default=512, gt=0)
    """Number of rows in one optimizer step; for DPO, reward models and other losses on pairs, the number of pairs. The
    default comes from the algorithm: for GRPO and distillation all rollouts of a step, for PPO a quarter of them."""
    train_micro_batch_size: Annotated[int, WhenChanged.RESUME] = Field(default=4, gt=0)
    """Number of rows in one training forward pass, unless packing or dynamic batching sets a token budget."""
    logprob_batch_size: Annotated[int, WhenChanged.RESUME] = Field(default=4, gt=0)
    """Number of rows in one forward-only pass, unless packing or dynamic batching sets a token budget."""
    max_total_sequence_length: int = Field(default=2048, gt=1)
    """Maximum number of tokens in a row: prompt, completions and observations."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Compute dtype. Master weights and optimizer state are float32 in each case. `float16` rounds eight times as
    finely as `bfloat16`, so that trainer and generator differ less, but values above 65,504 overflow: the loss is
    scaled, and steps that overflow are skipped (metrics `loss_scale` and `overflows`)."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum norm of the gradients, which are clipped to it; null does not clip."""
    max_skipped_steps: Annotated[int, WhenChanged.RESUME] = Field(default=10, ge=0)
    """Maximum number of consecutive optimizer steps that may be skipped because their gradient is not finite or its
    norm is above `skipped_grad_norm`. One more ends the run; 0 ends it at the first."""
    skipped_grad_norm: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Norm of the gradients above which an optimizer step is skipped; null skips only steps whose gradient is not
    finite. A guardrail with `action: skip_step` sets it."""
    family_check: Annotated[Literal["auto", "off"], WhenChanged.RESUME] = "auto"
    """Check of a model family before it is trained on a mesh that the project's tests do not cover: `auto` checks once
    that a tiny model of the family trains correctly there; `off` trains without the check."""
    hf_config_overrides: Annotated[dict[str, Any], WhenChanged.NEW_RUN] = {}
    """Fields of the model's Hugging Face config to replace."""
    logprob_chunk_size: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of tokens whose logits are in memory at a time. If null, 4,096 where kernels read the head in its own
    precision (on GPUs, in models with a hidden size of up to 4,096, without a token filter), which takes no more
    memory than 1,024 elsewhere; otherwise 1,024."""
    worker_timeout_s: Annotated[float, WhenChanged.RESUME] = Field(default=3600.0, gt=0)
    """Timeout in seconds of one call of the model's workers, such as an optimizer step, a pass over a batch or a save.
    After it every rank is asked to write the stacks of its threads to its log, and the run is restored as if a worker
    had died. A phase of a weight sync takes at most this time too, and 600 s."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: list[SchedulerConfig] = []
    """Learning-rate schedules in order; with an empty list the learning rate is constant."""
    freeze: Annotated[list[str], WhenChanged.NEW_RUN] = []
    """Patterns of parameters that do not train. A pattern matches the name of a parameter in `transformers`, such as
    `model.norm.weight`, or the name of a module, for all of its parameters, such as `model.layers.0`; `*` matches any
    characters, as in `*.mlp.gate`. Frozen parameters have the dtype of `precision`, no gradients and no optimizer
    state. Not for adapters, see `lora_cfg.target_modules`."""
    train_only: Annotated[list[str], WhenChanged.NEW_RUN] = []
    """Patterns, as in `freeze`, of the only parameters that train; all except those in `freeze` if empty."""
    lora_cfg: LoraConfig = LoraConfig()
    vision: VisionConfig = VisionConfig()
    draft_head: DraftHeadConfig | None = None
    """EAGLE-3 head that trains with the policy; if unset, the head that `generation` drafts with stays as it is."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    env_vars: Annotated[EnvVars, WhenChanged.RESUME] = {}
    """Environment variables of the model's workers, which override `cluster.env_vars`."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        reason = "cannot be combined with sequence_packing.enabled=true"
        remedy = "Set sequence_packing.enabled=false in the same section to pad rows instead of packing them"
        is_both = self.sequence_packing.enabled and self.dynamic_batching.enabled
        shares_padded = self.sequence_packing.shared_prefixes is True and not self.sequence_packing.enabled
        problems = (
            *((Problem("dynamic_batching.enabled", reason, remedy=remedy),) if is_both else ()),
            *((_PADDED_PREFIXES,) if shares_padded else ()),
            *_adapter_problems(self.lora_cfg),
            *_freezing_problems(self),
            *_vision_problems(self.vision, self.lora_cfg),
            *_schedule_problems(self.scheduler, scales_rates=bool(self.optimizer.lr_scales)),
            *(each for key, optimizer in _optimizers(self).items() for each in _optimizer_problems(key, optimizer)),
            *_argument_problems(self),
            *_override_problems(self.hf_config_overrides),
        )
        if problems:
            raise ProblemError(*problems)
        return self


_PADDED_PREFIXES = Problem(
    "sequence_packing.shared_prefixes",
    "needs packed rows, but sequence_packing.enabled is false",
    got=True,
    remedy="Set sequence_packing.enabled=true, or this key to auto or false",
)

_UNUSED_OVERRIDES = {
    **dict.fromkeys(
        ("output_router_logits", "router_aux_loss_coef"),
        "because losses here have no balancing term of the model's code",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "because precision sets the dtype"),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
        "because every pass chooses what it returns",
    ),
    "quantization_config": "because files are dequantised when they are read",
    "num_labels": "because the head of a reward model or a critic has one output",
}
"""Fields of Hugging Face configs that are set, or not read, by training here, each with the reason."""


def _override_problems(overrides: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems of fields without effect, and of older fields of rotary embeddings, which `transformers` would
    ignore or replace as a whole."""
    for name, reason in _UNUSED_OVERRIDES.items():
        if overrides.get(name):
            yield Problem.unused(f"hf_config_overrides.{name}", reason)
    for name in ("rope_scaling", "rope_theta"):
        if name in overrides:
            value = overrides[name] if name == "rope_scaling" else {name: overrides[name]}
            remedy = f"Write rope_parameters: {value}, which is merged with the model's own parameters"
            reason = "is an older name of a field of rope_parameters"
            yield Problem(f"hf_config_overrides.{name}", reason, remedy=remedy)


def _adapter_problems(lora: LoraConfig) -> Iterator[Problem]:
    if lora.adapter is not None and not lora.enabled:
        remedy = "Set lora_cfg.enabled=true, or remove this key"
        yield Problem.unused("lora_cfg.adapter", "with lora_cfg.enabled=false", remedy=remedy)
    if lora.enabled and lora.target_modules and lora.match_all_linear:
        reason = "with match_all_linear=true, which adds an adapter to every linear layer"
        remedy = "Set match_all_linear=false, or remove this key"
        yield Problem.unused("lora_cfg.target_modules", reason, remedy=remedy)
    variants = (("use_dora", lora.use_dora, lora.use_dora), ("init", lora.init, lora.init != "default"))
    for name, got, is_set in variants:
        if lora.enabled and lora.target_parameters and is_set:
            reason = "is for linear layers, and cannot be combined with adapters of experts (target_parameters)"
            remedy = "Remove this key, or leave target_parameters empty"
            yield Problem(f"lora_cfg.{name}", reason, got=got, remedy=remedy)
    if lora.max_adapters > 1 and not lora.enabled:
        remedy = "Set lora_cfg.enabled=true, or remove this key"
        yield Problem.unused("lora_cfg.max_adapters", "with lora_cfg.enabled=false", remedy=remedy)
    others: dict[str, Any] = {
        "target_parameters": lora.target_parameters,
        "use_dora": lora.use_dora,
        "init": lora.init if lora.init != "default" else None,
        "adapter": lora.adapter,
        "dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
    }
    for name, set_to in others.items() if lora.enabled and lora.max_adapters > 1 else ():
        if set_to:
            reason = "cannot be combined with several adapters (max_adapters), which have only ranks and scales"
            yield Problem(f"lora_cfg.{name}", reason, got=set_to, remedy="Remove this key, or set max_adapters=1")
    if lora.base_quantization is not None and not lora.enabled:
        remedy = "Set lora_cfg.enabled=true, or remove this key"
        yield Problem.unused("lora_cfg.base_quantization", "with lora_cfg.enabled=false", remedy=remedy)
    if lora.enabled and lora.base_quantization is not None and lora.init != "default":
        reason = "cannot be combined with lora_cfg.base_quantization, because an adapter cannot be attached to the"
        reason, remedy = f"{reason} quantised rest of the weights", "Remove one of the two"
        yield Problem("lora_cfg.init", reason, got=lora.init, remedy=remedy)
    if lora.adapter is not None and lora.init != "default":
        reason = "with lora_cfg.adapter, which the adapters start from"
        yield Problem.unused("lora_cfg.init", reason, remedy="Remove one of the two")
    if lora.enabled and lora.target_parameters and lora.dropout:
        reason = "cannot be combined with adapters of experts (target_parameters), which are added to the weights"
        reason, remedy = f"{reason} and have no inputs to drop", "Set dropout=0, or leave target_parameters empty"
        yield Problem("lora_cfg.dropout", reason, got=lora.dropout, remedy=remedy)


def _freezing_problems(model: ModelConfig) -> Iterator[Problem]:
    for name in ("freeze", "train_only"):
        if getattr(model, name) and model.lora_cfg.enabled:
            reason = "with lora_cfg.enabled=true, because only adapters train"
            remedy = "Choose the layers of adapters by lora_cfg.target_modules and lora_cfg.exclude_modules"
            yield Problem.unused(name, reason, remedy=remedy)


def _vision_problems(vision: VisionConfig, lora: LoraConfig) -> Iterator[Problem]:
    if vision.enabled and lora.enabled and lora.max_adapters > 1:
        reason, remedy = "cannot be combined with images (vision.enabled=true)", "Remove this key"
        yield Problem("lora_cfg.max_adapters", reason, got=lora.max_adapters, remedy=remedy)
    if vision.enabled and lora.enabled and lora.base_quantization is not None:
        reason = "has not been verified with models that take images (vision.enabled=true)"
        got, remedy = lora.base_quantization, "Remove this key"
        yield Problem("lora_cfg.base_quantization", reason, got=got, remedy=remedy)
    for name in ("tower", "projector"):
        key, chosen = f"vision.{name}", getattr(vision, name)
        if chosen != "frozen" and not vision.enabled:
            yield Problem.unused(key, "with vision.enabled=false", remedy="Set vision.enabled=true, or remove this key")
        elif chosen == "adapters" and not lora.enabled:
            remedy = "Set lora_cfg.enabled=true, or train all weights of this part: trained"
            yield Problem(key, "needs low-rank adapters, but lora_cfg.enabled is false", got=chosen, remedy=remedy)
        elif chosen == "trained" and lora.enabled:
            reason = "cannot be combined with lora_cfg.enabled=true, whose files hold adapters only"
            yield Problem(key, reason, got=chosen, remedy="Set adapters or frozen, or lora_cfg.enabled=false")
    least, most = vision.min_pixels, vision.max_pixels
    if least is not None and most is not None and least > most:
        reason, remedy = f"is more than max_pixels, which is {most}", "Lower min_pixels, or raise max_pixels"
        yield Problem("vision.min_pixels", reason, got=least, remedy=remedy)


def _class_problems(key: str, name: str, known: Mapping[str, frozenset[str]], kind: str) -> Iterator[Problem]:
    """Yield the problem of a class that torch does not have. Classes of other packages are checked in the worker's
    environment."""
    if name.startswith("torch.") and name not in known:
        remedy = nearest_as_remedy(name, known) or f"Choose one of {', '.join(sorted(known))}"
        yield Problem(f"{key}.name", f"is not {kind} of torch", got=name, remedy=remedy)


_ABSOLUTE = ("torch.optim.lr_scheduler.CyclicLR", "torch.optim.lr_scheduler.OneCycleLR")
"""Schedules whose own arguments are the learning rates of all parameters."""


def _schedule_problems(scheduler: list[SchedulerConfig], *, scales_rates: bool) -> Iterator[Problem]:
    for place, entry in enumerate(scheduler):
        if entry.name is None:
            continue
        if reason := UNSUPPORTED_SCHEDULES.get(entry.name, ""):
            remedy = "Choose another schedule, such as torch.optim.lr_scheduler.CosineAnnealingLR"
            if "combines" in reason:
                remedy = "Write its schedules as entries of scheduler, and their milestones in a separate entry"
            yield Problem(f"scheduler[{place}].name", reason, got=entry.name, remedy=remedy, feature=entry.name)
        else:
            yield from _class_problems(f"scheduler[{place}]", entry.name, SCHEDULES, "a learning-rate schedule")
        if scales_rates and entry.name in _ABSOLUTE:
            reason = "cannot be combined with optimizer.lr_scales, because it sets the learning rates of all parameters"
            remedy = "Choose another schedule, such as torch.optim.lr_scheduler.CosineAnnealingLR"
            yield Problem(f"scheduler[{place}].name", reason, got=entry.name, remedy=remedy)
    num_schedules = sum(entry.name is not None for entry in scheduler)
    milestones = [entry.milestones for entry in scheduler if entry.milestones is not None]
    num_milestones = sum(len(steps) for steps in milestones)
    if num_schedules > 1 and num_milestones != num_schedules - 1:
        reason = f"has {num_schedules} schedules and {num_milestones} milestones, but needs one fewer milestone than"
        remedy = f"Write {num_schedules - 1} milestones in a separate entry"
        yield Problem("scheduler", f"{reason} schedules", remedy=remedy)
    if num_schedules <= 1 and milestones:
        reason = (
            f"has milestones {milestones}, which separate schedules, but the number of schedules is {num_schedules}"
        )
        yield Problem("scheduler", reason, remedy="Add a schedule, or remove the milestones")


def _optimizers(model: ModelConfig) -> dict[str, OptimizerConfig]:
    """Return the optimizers of a model by their keys."""
    head = model.draft_head
    return {"optimizer": model.optimizer, **({} if head is None else {"draft_head.optimizer": head.optimizer})}


def _unsupported(key: str, name: str, reasons: Mapping[str, str]) -> Iterator[Problem]:
    if name in reasons:
        remedy = "Choose another optimizer, such as torch.optim.AdamW"
        yield Problem(f"{key}.name", reasons[name], got=name, remedy=remedy, feature=name)


def _optimizer_problems(key: str, optimizer: OptimizerConfig) -> Iterator[Problem]:
    yield from _unsupported(key, optimizer.name, UNSUPPORTED)
    if optimizer.name not in UNSUPPORTED:
        yield from _class_problems(key, optimizer.name, OPTIMIZERS, "an optimizer")
    if not optimizer.decay_norms_and_biases and "weight_decay" not in OPTIMIZERS.get(optimizer.name, ("weight_decay",)):
        without = f"with {optimizer.name}, which has no weight decay"
        yield Problem.unused(f"{key}.decay_norms_and_biases", without, remedy="Remove this key")


def _argument_problems(model: ModelConfig) -> Iterator[Problem]:
    """Unknown arguments of torch's optimizers and schedules, and values that no optimizer takes; other classes are
    checked in the worker's environment."""
    schedules = {f"scheduler[{place}]": entry for place, entry in enumerate(model.scheduler)}
    both: Mapping[str, OptimizerConfig | SchedulerConfig] = {**_optimizers(model), **schedules}
    for key, chosen in both.items():
        is_optimizer, name = isinstance(chosen, OptimizerConfig), chosen.name or ""
        known = (OPTIMIZERS if is_optimizer else SCHEDULES).get(name)
        if known is None:
            continue
        for argument in REQUIRED.get(name, ()):
            if argument not in chosen.kwargs:
                yield Problem(f"{key}.kwargs.{argument}", f"must be set, because {name} has no default for it")
        for argument, value in chosen.kwargs.items():
            if argument not in known:
                reason = f"is not an argument of {name}{did_you_mean(argument, known)}"
                yield Problem(f"{key}.kwargs.{argument}", reason, allowed=", ".join(sorted(known)))
            elif is_optimizer:
                reason = ""
                # Adafactor is the one optimizer with a pair of `eps`.
                if argument in PAIRS or (argument == "eps" and name == "torch.optim.Adafactor"):
                    is_pair = isinstance(value, list | tuple) and len(value) == 2
                    if argument == "betas" and not (
                        is_pair and all(_is_from_0_on(each) and each < 1 for each in value)
                    ):
                        reason = "must be a list of two numbers from 0 to less than 1"
                    elif not is_pair:
                        reason = "must be a list of two numbers"
                elif (argument in NUMBERS or argument == "eps") and not _is_from_0_on(value):
                    reason = "must be a number that is finite and not negative"
                is_with_comma = isinstance(value, str) and re.fullmatch(r"\d+,\d+", value)
                remedy = f"Write {value.replace(',', '.')}, with a point" if is_with_comma else ""
                if reason:
                    yield Problem(f"{key}.kwargs.{argument}", reason, got=value, remedy=remedy)


def _is_from_0_on(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def optimizer_problems(section: Any, unsupported: Mapping[str, str], device: Device | None) -> Iterator[Problem]:
    """Yield the problems of optimizers that a backend, or the device of a run, cannot step.

    Args:
        section: Section of a model, a `ModelConfig`.
        unsupported: Optimizer classes that the backend cannot step, each with the reason.
        device: Device of the workers; None if it is not known yet.
    """
    refused = {
        "differentiable": "records the step for gradients through it, which cannot be taken of a model that trains here"
    }
    if device is not None and not device.runs_on_gpus:
        refused["capturable"] = f"needs GPUs, but the device is {device.name}"
    for key, optimizer in _optimizers(section).items():
        yield from _unsupported(key, optimizer.name, unsupported)
        for argument, reason in refused.items() if optimizer.name in OPTIMIZERS else ():
            if optimizer.kwargs.get(argument):
                yield Problem(f"{key}.kwargs.{argument}", reason, got=True, remedy="Remove this key")


def local_hf_config(policy: ModelConfig) -> dict[str, Any]:
    """Return the fields of the language model's Hugging Face config with the overrides, if its `config.json` is on this
    machine; empty if it is not, or is not valid JSON."""
    fields = local_whole_config(policy)
    return with_overrides(language_fields(fields), policy.hf_config_overrides) if fields else {}


def local_whole_config(policy: ModelConfig) -> dict[str, Any]:
    """Return the fields of the whole Hugging Face config of a model, without overrides, if its `config.json` is on this
    machine; empty if it is not, or is not valid JSON."""
    try:
        fields = json.loads((Path(policy.model_name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def local_family(policy: ModelConfig) -> str | None:
    """Return the type of a model on this machine, of a composite model as a whole (`model_type` of its `config.json`);
    None if it is not on this machine."""
    family = local_whole_config(policy).get("model_type")
    return family if isinstance(family, str) else None


def local_image_token(policy: ModelConfig) -> int | None:
    """Return the id of the image tokens of a model on this machine that is trained with images; None for any other
    model."""
    return image_token(local_whole_config(policy)) if policy.vision.enabled else None


QWEN_WITH_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose image processors scale images to a number of pixels."""
ONLY_WITH_IMAGES = (*QWEN_WITH_IMAGES[:4], "glm4v", "glm4v_moe", "glm46v")
"""Families without a causal language model in transformers for their text."""


def image_family_problems(
    vision: VisionConfig, fields: Mapping[str, Any], families: Sequence[str]
) -> Iterator[Problem]:
    """Yield the settings of images that do not go with a model.

    Args:
        vision: Settings of images.
        fields: Fields of the whole Hugging Face config; empty if it is not available.
        families: Model types that a training backend trains with images.
    """
    kind = fields.get("model_type")
    if not vision.enabled and kind in ONLY_WITH_IMAGES:
        reason = f"must be true for {kind} models, which cannot be trained as language models"
        yield Problem("vision.enabled", reason, got=False, remedy="Set it to true; rows need no images")
    if not vision.enabled or kind is None:
        return
    if kind not in families:
        allowed = f"false, or a model of one of the families {', '.join(families)}"
        yield Problem("vision.enabled", f"is not supported for {kind} models", allowed=allowed)
        return
    for name in ("min_pixels", "max_pixels"):
        if getattr(vision, name) is not None and kind not in QWEN_WITH_IMAGES:
            reason = f"has no effect on {kind} models, whose images have fixed sizes"
            yield Problem(f"vision.{name}", reason, remedy="Remove this key")


class ColocatedResources(Config):
    """Devices that are reserved for generation."""

    gpus_per_node: int | None = Field(default=None, gt=0)
    """Number of GPUs per node reserved for generation."""
    num_nodes: int | None = Field(default=None, gt=0)
    """Number of nodes reserved for generation; 1 if unset."""


class ColocatedConfig(Config):
    """Devices of generation: shared with the policy, or separate."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = True
    """Share the policy's devices and take turns with it; otherwise generation has its own devices."""
    resources: ColocatedResources = ColocatedResources()


class GenerationConfig(Config):
    """Generation: the engine, sampling, its replicas, and how weights reach them."""

    backend: str = "vllm"
    """Name of the generation engine, such as `vllm`; `server` for HTTP servers that somebody else runs."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Maximum number of tokens to sample in one turn."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits when sampling, and in every training pass."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Cumulative probability of the most likely tokens that are kept (nucleus sampling). The policy's logprobs are
    computed over the tokens that `top_p`, `top_k` and `min_p` keep, as in the generator."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens that are kept; all if unset."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Minimum probability of the tokens that are kept, as a fraction of the probability of the most likely token."""
    stop_token_ids: list[int] = []
    """Tokens that end a completion, in addition to the end of sequence, the end of a turn in the chat template, and the
    special tokens in `eos_token_id` of the model's `generation_config.json`."""
    stop_strings: list[str] = []
    """Strings that end a completion."""
    thinking_budget: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of a turn before its thoughts end, in training, validation and evaluation; no limit if
    unset. Thoughts are between the marks of the model, such as `<think>` and `</think>`. If they are still open after
    so many tokens of the turn, they are ended by `thinking_budget_mode`; thoughts that begin later are not limited."""
    thinking_budget_mode: Literal["close", "truncate"] = "close"
    """Treatment of thoughts that reach `thinking_budget`. `close`: the tokens of `thinking_end` are appended and the
    policy answers after them. They are not sampled, so they are outside of the loss and have no logprob. `truncate`:
    the turn ends, as it does at `max_new_tokens`."""
    thinking_end: str | None = None
    """Text that ends thoughts with `thinking_budget_mode: close`; it contains the mark that ends them. If unset, the
    mark on a line of its own, such as `\\n</think>\\n\\n`."""
    exact: Annotated[bool, WhenChanged.RESUME] = False
    """Compute the logprobs of sampled tokens with the same bits in trainer and generator, and end the run at the first
    one that differs. It is slower. For the `dtensor` trainer with the `hf` generator on `cpu`, in
    float32, with GRPO and PPO; models with experts, images, recurrent layers or adapters are refused."""
    val_temperature: Annotated[float, WhenChanged.RESUME] = Field(default=0.0, ge=0)
    """Temperature in validation; 0 is greedy."""
    val_top_p: Annotated[float, WhenChanged.RESUME] = Field(default=1.0, gt=0, le=1)
    """Cumulative probability of the most likely tokens that are kept in validation."""
    val_top_k: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Number of most likely tokens that are kept in validation; all if unset."""
    min_replicas: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Minimum number of replicas for a run to continue if it loses others and the cluster has no devices to replace
    them. With fewer it waits for devices, up to `cluster.replacement_timeout_s`. If unset, all that the run starts
    with. Only for generation with its own devices."""
    max_replicas: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Maximum number of replicas: further ones are started in the background if the cluster has enough free devices,
    and join at the next weight update. If unset, as many as the run starts with. Only for generation with its own
    devices."""
    stall_timeout_s: Annotated[float, WhenChanged.RESUME] = Field(default=600.0, gt=0)
    """Timeout in seconds for a replica that has work but makes no progress (no token, no finished group). After it the
    replica is asked to write the stacks of its threads to its log, and replaced."""
    canary_tolerance: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Mean difference between the engine's logprobs and the policy's for the same prompts that is accepted after any
    weight sync. If unset, 0.001 in float32 and 0.1 in bfloat16. More is accepted, with a warning, if the first version
    showed more: up to three times its difference, and never more than ten times this value. What quantised weights
    of an engine may change is measured and added; a quantised KV cache needs a larger value."""
    weight_sync: Annotated[WeightSyncChoice, WhenChanged.RESUME] = "auto"
    """Transport of weights to the generators. `ipc`: through memory of a GPU, or of a node, that policy and generator
    share. `collective`: NCCL, or gloo on CPU. `disk`: through files under `weights/` in the run directory, one version
    at a time, for generators that share only a file system with the policy, and for servers. `auto`: `ipc` if memory is
    shared, `disk` for servers, otherwise `collective`."""
    weight_sync_encoding: Annotated[WeightSyncEncoding, WhenChanged.RESUME] = "full"
    """Values that a weight update sends. `full`: all values. `changes`, over `collective` or `disk`: the values whose
    bits changed since the previous update, and all values to a replica that joins or was restarted. In bfloat16 a step
    changes few of them, which helps on slow links. Over `collective`, and over `ipc` if the policy has several nodes,
    ranks send pieces as with `parts`, and only changed values of a piece to another node; each keeps in host memory the
    bytes that it sends and receives. Over `disk`, and for weights that no ranks hold in parts, this costs a full copy
    of the weights in host memory on the first rank of the policy and on every rank of the generators. `parts`, over
    `ipc` or `collective`: the ranks of the policy send only pieces of tensors, to one another or to the engine ranks
    that keep them, and none puts together a whole tensor. It is not tested on GPUs yet."""
    lora_sync: Annotated[Literal["merged", "adapter"], WhenChanged.RESUME] = "merged"
    """Form of weights with low-rank adapters (`policy.lora_cfg`) on their way to the generators. `merged`: all weights
    at every step, with the adapters merged into them. `adapter`: the weights once, and from then on only the adapters,
    which the engine (vLLM) applies itself, as the policy does; on shared GPUs the engine then keeps the weights in host
    memory while the policy trains."""
    colocated: ColocatedConfig = ColocatedConfig()
    env_vars: Annotated[EnvVars, WhenChanged.RESUME] = {}
    """Environment variables of the engine's workers, which override `cluster.env_vars`."""

    @property
    def token_filter(self) -> TokenFilter | None:
        """The filter that training rollouts are drawn with; None if it would keep all tokens."""
        found = TokenFilter(self.top_k or 0, self.top_p, self.min_p)
        return None if found.keeps_all else found


class GeneratingModelConfig(ModelConfig):
    """A model with the engine that serves it, for annotations: the type of a run's section is assembled from the
    installed backends and engines."""

    generation: GenerationConfig = GenerationConfig()


def reduced_precision(model: Any) -> list[str]:
    """Keys and values, relative to the model's section, that reduce the precision of its training or engine below
    `precision`. Rollouts and training then differ by more than the order of sums.

    Args:
        model: Section of a model with an engine, a `GeneratingModelConfig`.
    """
    backends = [value for value in vars(model).values() if isinstance(value, BackendConfig)]
    chosen = [backend for backend in backends if backend.enabled] or backends
    engines = [value for value in vars(model.generation).values() if isinstance(value, EngineConfig)]
    trained = [backend.reduced_precision for backend in chosen]
    served = [f"generation.{engine.reduced_precision}" for engine in engines if engine.reduced_precision]
    return [found for found in (*trained, *served) if found]


_Section = TypeVar("_Section", bound=Config)
