"""Thirteen chat templates in the structure of model families, and conversations in which every piece is its own word.

Eight templates are those of `chat_tokenizers`. The others are written here.
"""

from functools import cache

from chat_tokenizers import PLAIN, Family, tokenizer_of, with_template

from rl_algos.data.rows.messages import as_messages

_GEMMA_2 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_KIMI = """{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{%- set name = message.get('name') or message['role'] %}
{%- if message['role'] == 'user' %}{{ '<|im_user|>' + name + '<|im_middle|>' }}
{%- elif message['role'] == 'assistant' %}{{ '<|im_assistant|>' + name + '<|im_middle|>' }}
{%- else %}{{ '<|im_system|>' + name + '<|im_middle|>' }}{% endif %}
{%- if message['role'] == 'tool' %}{{ '## Return of ' + (message.tool_call_id or '') + '\n' }}{% endif %}
{{- message['content'] }}
{%- if message.get('tool_calls') %}{{ '<|tool_calls_section_begin|>' }}
{%- for call in message['tool_calls'] %}
{{- '<|tool_call_begin|>' }}{{ call['id'] }}{{ '<|tool_call_argument_begin|>' }}
{%- set arguments = call['function']['arguments'] %}
{{- arguments if arguments is string else arguments | tojson }}{{ '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

_HYBRID = """{%- set thinks = enable_thinking is not defined or enable_thinking %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<SPECIAL_10>System\n' + system }}
{%- if tools %}{{ '\n<AVAILABLE_TOOLS>' + tools | tojson + '</AVAILABLE_TOOLS>' }}{% endif %}{{ '\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<SPECIAL_11>User\n' + message.content + '\n' }}
{%- elif message.role == 'tool' %}{{ '<SPECIAL_11>User\n<TOOL_RESPONSE>' + message.content + '</TOOL_RESPONSE>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1] if '</think>' in message.content and not loop.last
    else message.content %}
{{- '<SPECIAL_11>Assistant\n' + content }}
{%- if message.tool_calls %}{{ '<TOOLCALL>[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- '' if loop.last else ', ' }}
{%- endfor %}{{ ']</TOOLCALL>' }}{% endif %}{{ '\n<SPECIAL_12>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<SPECIAL_11>Assistant\n' + ('<think>\n' if thinks else '<think></think>') }}{% endif %}"""

_MERGING = """{{ '<|begin|>' }}
{%- for message in messages %}
{%- if loop.first or messages[loop.index0 - 1].role != message.role %}{{ '<|' + message.role + '|>\n' }}
{%- else %}{{ '\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '\n' + call.function | tojson }}{% endfor %}
{%- if loop.last or messages[loop.index0 + 1].role != message.role %}{{ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

_MARKED_PARTS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- set said %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}{{ '<|image_pad|>' }}
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endset %}
{%- if message.role == 'assistant' %}
{%- generation %}{{ said }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ said + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_OWN = {
    "gemma_2": (Family(("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")), _GEMMA_2),
    "kimi_k2": (
        Family(
            (
                "<|im_end|>",
                *(f"<|im_{part}|>" for part in ("user", "assistant", "system", "middle")),
                *(f"<|tool_calls_section_{part}|>" for part in ("begin", "end")),
                *(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end")),
            )
        ),
        _KIMI,
    ),
    "nemotron_hybrid": (Family(("<SPECIAL_12>", "<SPECIAL_10>", "<SPECIAL_11>"), PLAIN[:2]), _HYBRID),
    "merging": (Family(("<|end|>", "<|begin|>", *(f"<|{role}|>" for role in ("user", "assistant", "tool")))), _MERGING),
    "marked_parts": (Family(("<|im_end|>", "<|im_start|>", "<|image_pad|>"), PLAIN[2:4]), _MARKED_PARTS),
}

STRUCTURES = (
    "qwen2_5",
    "qwen3",
    "llama3_1",
    "gemma_2",
    "deepseek_v3",
    "mistral",
    "glm4_moe",
    "phi4",
    "kimi_k2",
    "gpt_oss",
    "nemotron_hybrid",
    "merging",
    "marked_parts",
)


@cache
def structure(name):
    """The tokenizer of a structure."""
    return with_template(*_OWN[name]) if name in _OWN else tokenizer_of(name)


TOOLS = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": "Does it.", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("alpha", "beta")
)


def user(text, **more):
    return {"role": "user", "content": text, **more}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, number, **arguments):
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, number, name="alpha"):
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": text}


CONVERSATIONS = {
    "plain": [user("apple"), says("berry")],
    "system": [{"role": "system", "content": "cedar"}, user("apple"), says("berry")],
    "developer": [{"role": "developer", "content": "cedar"}, user("apple"), says("berry")],
    "several turns": [user("apple"), says("berry"), user("date"), says("elder")],
    "an empty turn": [user("apple"), says(""), user("date"), says("elder")],
    "a list of parts": [user([{"type": "text", "text": "ap"}, {"type": "text", "text": "ple"}]), says("berry")],
    "thoughts": [user("apple"), says("<think>\nfig\n</think>\n\nberry")],
    "thoughts without a line break": [user("apple"), says("<think>fig</think>berry")],
    "thoughts apart": [user("apple"), says("berry", reasoning_content="fig")],
    "text before thoughts": [user("apple"), says("grape <think>fig</think>berry")],
    "a call": [user("apple"), says(None, tool_calls=[call("alpha", 1, hazel="iris", kale=0)])],
    "a call and its result": [
        user("apple"),
        says("", tool_calls=[call("alpha", 1, hazel="iris")]),
        result("lemon", 1),
        says("berry"),
    ],
    "text beside a call": [
        user("apple"),
        says("grape", tool_calls=[call("alpha", 1, hazel="iris")]),
        result("lemon", 1),
        says("berry"),
    ],
    "parallel calls": [
        user("apple"),
        says("", tool_calls=[call("alpha", 1, hazel="iris"), call("beta", 2, kale={"moss": ["nut", "olive"]})]),
        result("lemon", 1),
        result("mango", 2, "beta"),
        says("berry"),
    ],
    "ids of Kimi": [
        user("apple"),
        says("", tool_calls=[{**call("alpha", 1, hazel="iris"), "id": "functions.alpha:0"}]),
        {**result("lemon", 1), "tool_call_id": "functions.alpha:0"},
        says("berry"),
    ],
    "results in another order": [
        user("apple"),
        says("", tool_calls=[call("alpha", 1, hazel="iris"), call("beta", 2, kale="nut")]),
        result("mango", 2, "beta"),
        result("lemon", 1),
        says("berry"),
    ],
    "an older call": [
        user("apple"),
        {"role": "assistant", "content": None, "function_call": {"name": "alpha", "arguments": '{"hazel": "iris"}'}},
        {"role": "function", "name": "alpha", "content": "lemon"},
        says("berry"),
    ],
    "weights": [user("apple"), says("berry", weight=0), user("date"), says("elder", weight=1)],
    "two users": [user("apple"), user("date"), says("berry")],
    "two answers": [user("apple"), says("berry"), says("elder")],
    "a user at the end": [user("apple"), says("berry"), user("date")],
    "the same text twice": [user("berry"), says("berry"), user("berry"), says("berry")],
    "a name": [user("apple", name="quince"), says("berry")],
    "roles of Gemini": [
        {"role": "user", "parts": [{"text": "apple"}]},
        {"role": "model", "parts": [{"text": "berry"}]},
    ],
    "a refusal": [user("apple"), {"role": "assistant", "content": None, "refusal": "berry"}],
    "a result nobody reads": [user("apple"), says("grape"), {"role": "tool", "content": "lemon"}, says("berry")],
}


SHOW_NO_TOOLS = ("gemma_2", "deepseek_v3", "phi4", "merging", "marked_parts")
"""Structures that do not show the column `tools`, for which a row has none here."""


def tools_of(name, conversation):
    """The tools of a conversation with calls, for a template that shows tools."""
    calls = any("tool_calls" in message for message in conversation)
    return TOOLS if calls and name not in SHOW_NO_TOOLS else ()


def conversation(name):
    """The messages of a conversation as data has them."""
    return as_messages(CONVERSATIONS[name])
