"""Requests of agent frameworks, as their libraries sent them in their usual modes, get the form that they ask for.

`framework_requests.json` has the bodies with the versions of the libraries.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from scripted_client import ScriptedClient
from served_rollout import served

from rl_core.rollouts.rollout import Completion, WeightSpan

REQUESTS = json.loads((Path(__file__).parent / "framework_requests.json").read_text(encoding="utf-8"))
FAVOURED = {'"': 5, "{": 6, "}": 4, "]": 3, "<": -12, "<tool_call>": -4}
"""Weights of characters in the logits of the policy below, with which it ends its strings soon."""
SELDOM = (" ", "\n", "\t", "\r", "\\", "<think>", "</think>", "</tool_call>", "<tool_response>", "</tool_response>")


class Random(ScriptedClient):
    """A policy without any skill: it draws characters within the grammar of the request."""

    async def generate(self, token_ids, sampling=None, *, draw=None, agent=""):
        self.requests.append((token_ids, sampling, draw))
        logits, end = np.zeros(len(self.tokenizer)), self.tokenizer.eos_token_id
        for text, weight in {**FAVOURED, **dict.fromkeys(SELDOM, -8)}.items():
            logits[self.tokenizer.convert_tokens_to_ids(text)] = weight
        logits[[self.tokenizer.pad_token_id, self.tokenizer.unk_token_id]], logits[end] = -20, 6
        state = self._chat._grammars.begin(sampling.grammar, (end,))
        rng, tokens = np.random.default_rng(4), []
        while end not in tokens and len(tokens) < sampling.max_new_tokens:
            words = state.allowed()
            bits = np.ones(len(logits)) if words is None else np.unpackbits(words.view(np.uint8), bitorder="little")
            weights = np.exp(logits) * bits[: len(logits)]
            tokens.append(int(rng.choice(len(logits), p=weights / weights.sum())))
            state.accept(tokens[-1])
        reason = "stop" if end in tokens else "length"
        drawn = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        return Completion(*drawn, reason, (WeightSpan(1, len(tokens)),))


def asked(request, structured_output):
    async def main():
        policy = Random(None, max_new_tokens=2000)
        async with served(policy, structured_output=structured_output, max_tokens=20_000) as rollout:
            return *await rollout.post(request["path"], request["body"]), rollout.session.ignored

    return asyncio.run(main())


def parts_of(answer):
    """The text and the calls of an answer."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"], calls
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [item for item in answer["output"] if item["type"] == "function_call"]


def check(value, schema):
    """Check that an object has the properties of a schema, all of which are required, with their types."""
    assert isinstance(value, dict)
    properties = schema.get("properties")
    if properties is not None:
        assert value.keys() == properties.keys()
        kinds = {"integer": int, "string": str}
        assert all(type(value[name]) is kinds[each["type"]] for name, each in properties.items())


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: f"{each['library'].split()[0]}: {each['mode']}")
def test_usual_modes_of_frameworks_get_what_they_ask_for(request_):
    body = request_["body"]
    status, answer, ignored = asked(request_, "constrain")
    assert status == 200, answer
    assert not ignored & {"response_format", "text.format", "tool_choice", "tools.strict"}
    text, calls = parts_of(answer)
    tools = {each.get("function", each)["name"]: each.get("function", each) for each in body.get("tools", ())}
    asked_for = body.get("response_format") or body.get("text", {}).get("format")
    if body.get("tool_choice") not in (None, "auto"):
        assert calls
    for call in calls:
        check(json.loads(call["arguments"]), tools[call["name"]]["parameters"])
    if asked_for and not calls:
        schema = asked_for.get("json_schema", asked_for).get("schema", {"type": "object"})
        check(json.loads(text), schema)


def test_runs_that_refuse_formats_answer_with_the_remedy():
    for request in REQUESTS:
        fields = request["body"].get("response_format"), request["body"].get("text", {}).get("format")
        if any(fields):
            status, answer, _ = asked(request, "refuse")
            assert status == 400
            assert "set structured_output of the algorithm to constrain" in answer["error"]["message"]
