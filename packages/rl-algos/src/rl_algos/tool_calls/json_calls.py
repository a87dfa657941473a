"""Tool calls that are written as JSON: by Hermes and Qwen, Llama 3, Mistral and DeepSeek."""

from __future__ import annotations

import re
from functools import partial

from rl_algos.tool_calls import parsed
from rl_core.rollouts.environment import ToolCall
from rl_core.rollouts.model_json import MalformedJson, after_space, read_model_json_at
from rl_core.rollouts.thoughts import THOUGHTS

_TOOL_CALL = re.compile("</?tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"([\w.\-:/]++)(?:\[CALL_ID\]\w*+)?(\[ARGS\])?")
_LLAMA = "<|python_tag|>"
_LLAMA_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*+)"')
_DEEPSEEK_MARK = re.compile("<｜tool▁(?:call▁begin|call▁end|sep)｜>")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def hermes(text: str, schemas: parsed.Schemas, opened: str = "") -> parsed.Parsed:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    first, calls = parsed.marked_calls(text, "<tool_call>", partial(_hermes_call, schemas=schemas), opened)
    return parsed.Parsed(text[:first], tuple(calls))


def llama(text: str, schemas: parsed.Schemas, opened: str = "") -> parsed.Parsed:
    """Read `{"name": ..., "parameters": {...}}` as the whole turn, or `<|python_tag|>` and it; one call a turn.

    Without the mark, JSON is a call only if it has `parameters` or `arguments`, or the name of a tool that is offered;
    other JSON is an answer.
    """
    begin = after_space(text, parsed.end_of_thoughts(text))
    if opened and not text.startswith("{", begin):
        _, closed, rest = text[begin:].partition(THOUGHTS[opened])
        begin = after_space(text, len(text) - len(rest)) if closed else begin
    if text.startswith("{", begin):
        # An object at the beginning may be an answer, so its keys or its name must fit a call.
        try:
            found, _ = read_model_json_at(text, begin)
        except MalformedJson:
            name = _LLAMA_NAME.match(text, begin)
            has_key = '"parameters"' in text or '"arguments"' in text
            is_call = name is not None and (name[1] in schemas or has_key)
        else:
            is_named = isinstance(found.get("name"), str)
            is_call = is_named and (found["name"] in schemas or "parameters" in found or "arguments" in found)
        return parsed.Parsed(text[:begin], (_llama_call(text, begin, schemas),)) if is_call else parsed.Parsed(text)
    content, marked, rest = text[begin:].partition(_LLAMA)
    if not marked or (content and not rest.lstrip().startswith("{")):
        return parsed.Parsed(text)
    call = _llama_call(text, len(text) - len(rest), schemas)
    return parsed.Parsed(text[:begin] + content, (call,))


def mistral(text: str, schemas: parsed.Schemas, opened: str = "") -> parsed.Parsed:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    first, calls = parsed.marked_calls(text, _MISTRAL, partial(_mistral_calls, schemas=schemas), opened)
    return parsed.Parsed(text[:first], tuple(calls))


def deepseek(text: str, schemas: parsed.Schemas, opened: str = "") -> parsed.Parsed:
    """Read `<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>` around `function<｜tool▁sep｜>NAME` and fenced JSON (V3, R1),
    or `NAME<｜tool▁sep｜>{...}` (V3.1).
    """
    first, calls = parsed.marked_calls(text, _DEEPSEEK_BEGIN, partial(_deepseek_call, schemas=schemas), opened)
    content = text[:first]
    return parsed.Parsed(content.rstrip().removesuffix("<｜tool▁calls▁begin｜>") if calls else content, tuple(calls))


def broken_block(text: str, begin: int, problem: str) -> parsed.BrokenCall:
    """Return the error of a `<tool_call>` without a call after it.

    Args:
        text: The turn.
        begin: Position of the first character in the block.
        problem: Error of a block that is closed.
    """
    mark = _TOOL_CALL.search(text, begin)
    if mark is not None and mark[0] == "</tool_call>":
        return parsed.BrokenCall(problem, mark.end())
    end = mark.start() if mark else len(text)
    return parsed.BrokenCall("it is not closed by </tool_call>", end, mention=begin < len(text))


def _hermes_call(text: str, start: int, *, schemas: parsed.Schemas) -> tuple[list[ToolCall], int]:
    start = after_space(text, start)
    if text[start : start + 1] not in ("{", "["):
        problem = f"it is not valid JSON: it must be a JSON object, got {text[start : start + 20]!r}"
        raise broken_block(text, start, problem)
    found, end = parsed.object_before(text, start, "</tool_call>")
    return [parsed.object_call(found, "arguments", schemas)], end


def _llama_call(text: str, start: int, schemas: parsed.Schemas) -> ToolCall:
    try:
        found, end = parsed.object_before(text, start)
    except parsed.BrokenCall as broken:
        return parsed.malformed(str(broken))
    call = parsed.object_call(found, "parameters", schemas)
    rest = text[end:].strip()
    if not call.error and rest:
        return parsed.malformed(f"a turn has one call and no text after it, got {rest[:20]!r}", call.name)
    return call


def _mistral_calls(text: str, start: int, *, schemas: parsed.Schemas) -> tuple[list[ToolCall], int]:
    start = after_space(text, start)
    if text[start : start + 1] in ("{", "["):
        found, end = parsed.object_before(text, start)
        _require_end(text, end, "")
        listed = found if isinstance(found, list) else [found]
        calls = [parsed.object_call(each, "arguments", schemas) for each in listed[: parsed.MAX_CALLS + 1]]
        return calls or [parsed.malformed("the list of calls is empty")], end
    named = _MISTRAL_NAME.match(text, start)
    if named is None:
        raise parsed.BrokenCall("it is not valid JSON, nor the name of a tool", start, mention=start < len(text))
    begin = after_space(text, named.end())
    if named[2] and (begin == len(text) or text.startswith(_MISTRAL, begin)):
        return [parsed.without_arguments(named[1], schemas)], begin
    if not named[2] and not text.startswith("{", begin):
        raise parsed.BrokenCall("it is not valid JSON, nor the name of a tool and [ARGS]", begin, mention=True)
    arguments, end = parsed.object_before(text, begin, name=named[1])
    _require_end(text, end, named[1])
    return [parsed.named_call(named[1], arguments)], end


def _require_end(text: str, end: int, name: str) -> None:
    """Require that nothing but another call follows."""
    rest = after_space(text, end)
    if rest < len(text) and not text.startswith(_MISTRAL, rest):
        raise parsed.BrokenCall(f"there is text after its JSON: {text[rest : rest + 20]!r}", rest, name=name)


def _deepseek_call(text: str, start: int, *, schemas: parsed.Schemas) -> tuple[list[ToolCall], int]:
    mark = _DEEPSEEK_MARK.search(text, start)
    if mark is None or mark[0] == _DEEPSEEK_BEGIN:
        mention = after_space(text, start) < len(text)
        end = mark.start() if mark else len(text)
        raise parsed.BrokenCall(f"it is not closed by {_DEEPSEEK_END}", end, mention=mention)
    if mark[0] == _DEEPSEEK_END:
        raise parsed.BrokenCall("it has no <｜tool▁sep｜>", mark.end())
    name = text[start : mark.start()].strip()
    begin = after_space(text, mark.end())
    if name == "function" and not text.startswith("{", begin):
        return _fenced_call(text, begin)
    if text.startswith(_DEEPSEEK_END, begin):
        return [parsed.without_arguments(name, schemas)], begin
    arguments, end = parsed.object_before(text, begin, _DEEPSEEK_END, name=name)
    return [parsed.named_call(name, arguments)], end


def _fenced_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Read the name of a tool, and its arguments in a Markdown block."""
    line = text[start : start + 200].partition("\n")[0]
    name, begin = line.strip(), start + len(line) + 1
    fence = after_space(text, begin)
    if not text.startswith("```json", fence):
        raise parsed.BrokenCall("the name of a tool and a ```json block must follow <｜tool▁sep｜>", start)
    arguments, end = parsed.object_before(text, fence + len("```json"), "```", _DEEPSEEK_END, name=name)
    return [parsed.named_call(name, arguments)], end
