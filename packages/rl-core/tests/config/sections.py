"""Sections of a root type like the real ones."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl_core.config import Config, Problem, ProblemError


class Attention(Enum):
    SDPA = "sdpa"
    FLASH = "flash"


class ScalingConfig(Config):
    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "ScalingConfig":
        if self.source_min >= self.source_max:
            raise ProblemError(Problem("source_min", got=self.source_min, allowed="less than source_max"))
        return self


class GRPOConfig(Config):
    """Group relative policy optimization."""

    num_prompts_per_step: int = Field(default=32, gt=0)
    """Prompts of one step."""
    num_generations_per_prompt: int = Field(default=16, gt=0)
    """Completions of one prompt."""
    max_num_steps: int | None = None
    """Steps of the run; unlimited where unset."""
    use_leave_one_out_baseline: bool = False
    """Leave a rollout out of its own baseline."""
    seed: int = 42
    """Seed of every random choice."""
    reward_scaling: ScalingConfig = ScalingConfig()


class LossConfig(Config):
    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Weight of the KL term."""
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    kind: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Truncation of the importance correction."""


class TokenizerConfig(Config):
    name: str | None = None
    chat_template: str | None = None


class GenerationConfig(Config):
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    top_k: int | None = None
    max_new_tokens: int = 512
    stop_strings: list[str] = []
    """Texts that end a completion."""
    stop_token_ids: tuple[int, ...] = ()


class ModelConfig(Config):
    model_name: str
    """Folder or hub name."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype."""
    train_global_batch_size: int = 512
    max_total_sequence_length: int = 2048
    tokenizer: TokenizerConfig = TokenizerConfig()
    overrides: dict[str, Any] = {}
    layer_names: dict[str, str] = {}
    attention: Attention = Attention.SDPA
    folder: Path = Path("models")


class BackendConfig(Config):
    enabled: bool | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share every matrix."""


class DatasetConfig(Config):
    dataset_name: str
    split: str = "train"
    weight: Annotated[float, Field(gt=0)] = 1.0


class DataConfig(Config):
    train: DatasetConfig | list[DatasetConfig]
    shuffle: bool = True


class EnvConfig(Config):
    num_workers: int = 1
    timeout: float | Literal["never"] = 10.0
