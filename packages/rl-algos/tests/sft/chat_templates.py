"""Chat templates in the formats of model families, and what each makes of two turns."""

from dataclasses import dataclass, field

from rl_algos.tiny_model import make_tokenizer

TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


@dataclass(frozen=True)
class Format:
    """A family's format.

    Args:
        special: its special tokens.
        template: Jinja.
        parts: of the rendered `TURNS`, in order: what is not learned and what is, by turns.
    """

    special: tuple[str, ...]
    template: str
    parts: tuple[str, ...] = field(default=())

    def tokenizer(self):
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(list(self.special), special_tokens=True)
        tokenizer.chat_template = self.template
        return tokenizer


LLAMA_3 = Format(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "{{- '<|begin_of_text|>' }}{% for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
    "+ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    (
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1=<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        "2<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n2+2=<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "4<|eot_id|>",
    ),
)

CHATML = Format(
    ("<|im_start|>", "<|im_end|>"),
    "{% if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
    (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n",
        "4<|im_end|>",
        "\n",
    ),
)

MARKED = Format(
    CHATML.special,
    "{% for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{% else %}{{- m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
    (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n",
        "4<|im_end|>",
        "\n",
    ),
)

MISTRAL = Format(
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "{{- '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{% else %}{{- ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
    ("<s>[INST] 1+1=[/INST]", " 2</s>", "[INST] 2+2=[/INST]", " 4</s>"),
)

GEMMA = Format(
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "{{- '<bos>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}",
    (
        "<bos><start_of_turn>user\n1+1=<end_of_turn>\n<start_of_turn>model\n",
        "2<end_of_turn>",
        "\n<start_of_turn>user\n2+2=<end_of_turn>\n<start_of_turn>model\n",
        "4<end_of_turn>",
        "\n",
    ),
)

THINKING = Format(
    CHATML.special,
    "{% for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
    (
        (
            "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
        ),
        "<think>\n\n</think>\n\n4<|im_end|>",
        "\n",
    ),
)
"""Thoughts stand in the last turn alone: earlier turns change when one is added, as Qwen3's do."""

APPENDING = {"llama-3": LLAMA_3, "chatml": CHATML, "marked": MARKED, "mistral": MISTRAL, "gemma": GEMMA}
"""Formats that leave earlier turns as they are."""
