"""Tools that the tests of tool calls offer, and how a turn of each format is read and written."""

import json

from chat_tokenizers import tokenizer_of

from rl_algos.tool_calls.formats import FORMATS
from rl_algos.tool_calls.parsed import schemas_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "note": {"type": "string"},
                    "of": {"type": "array"},
                    "by": {"type": "object"},
                    "exact": {"type": "boolean"},
                    "share": {"type": "number"},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = schemas_of(TOOLS)
FAMILIES = {
    "hermes": "qwen3",
    "qwen_coder": "qwen3_6",
    "glm": "glm4_moe",
    "llama": "llama3_1",
    "mistral": "mistral",
    "deepseek": "deepseek_v3",
    "harmony": "gpt_oss",
}
"""By format, a family of models that writes it."""


def read(name, text, schemas=SCHEMAS, opened=""):
    return FORMATS[name].parse(text, schemas, opened)


def write(name, calls):
    """The text of calls as the chat template of a family writes them."""
    as_text = FORMATS[name].arguments_as_text
    written = [
        {
            "type": "function",
            "id": f"call{index:05d}",
            "function": {
                "name": tool,
                "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
            },
        }
        for index, (tool, arguments) in enumerate(calls)
    ]
    tokenizer = tokenizer_of(FAMILIES[name])
    asked = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "", "tool_calls": written}
    before = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([asked, said], tokenize=False)
    begin = next(end for end in range(len(before), 0, -1) if text.startswith(before[:end]))
    turn = text[begin - text[:begin].endswith("<") :]  # of a mark that begins as that of the prompt
    for end in (tokenizer.eos_token, "<|call|>", "<|eot_id|>", "<|im_end|>"):
        turn = turn.rstrip("\n").removesuffix(end)
    return turn
