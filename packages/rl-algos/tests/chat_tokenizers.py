"""Tokenizers of single characters with the special tokens and the chat templates of real models."""

import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "rollouts" / "chat_templates"
CHARACTERS = string.printable + "▁｜éß世界🦕"
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Family:
    """Special tokens of a family of models, the end of sequence first."""

    special: tuple[str, ...]
    plain: tuple[str, ...] = ()


FAMILIES = {
    "qwen2_5": Family(("<|im_end|>", "<|im_start|>"), PLAIN[2:4]),
    "qwen3": Family(("<|im_end|>", "<|im_start|>"), PLAIN),
    "qwen3_6": Family(("<|im_end|>", "<|im_start|>"), PLAIN),
    "llama3_1": Family(
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
    ),
    "gemma3": Family(("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")),
    "deepseek_v3": Family(
        (
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
            *(f"<｜tool▁{part}｜>" for part in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
        ),
        PLAIN[:2],
    ),
    "gpt_oss": Family(
        ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>")
    ),
    "glm4_moe": Family(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), PLAIN
    ),
    "phi3": Family(("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "phi4": Family(("<|im_end|>", "<|im_start|>", "<|im_sep|>", "<|endoftext|>")),
    "granite": Family(("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")),
    "mistral": Family(
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        )
    ),
}
"""By the name of their template."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of a family."""
    return with_template(FAMILIES[family], (FOLDER / f"{family}.jinja").read_text(encoding="utf-8"))


def with_template(tokens: Family, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a family and a chat template."""
    names = ["<pad>", "<unk>", *tokens.special, *tokens.plain]
    vocabulary = {token: index for index, token in enumerate([*names, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=tokens.special[0],
        bos_token=tokens.special[1],
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(tokens.special[2:]),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
