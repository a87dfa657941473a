"""Rollouts as a run records them."""


def rollout(prompt, response, reward, *, prompt_id=None, failure=""):
    return {
        "prompt_id": prompt_id or prompt,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}],
        "turns": [{"text": response, "observation": None, "rewards": {"reward": reward}}],
        "rewards": {} if failure else {"reward": reward},
        "status": "failed" if failure else "ok",
        "failure": failure,
        "stop_reason": "stop",
        "num_sampled": len(response.split()),
    }


def agent_rollout(prompt, reward):
    """A rollout of an agent that begins again with a summary."""
    made = rollout(prompt, "", reward)
    del made["turns"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    system, seen = {"role": "system", "content": "You repair code."}, {"role": "tool", "content": "42 files"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    made["segments"] = [
        {
            "num_tokens": 41,
            "call": 3,
            "shared": {"segment": 1, "messages": 1},
            "messages": [{"role": "user", "content": "In short: 42 files."}, call],
            "turns": [{"text": "It is repaired.", "rewards": {}}],
        },
        {
            "num_tokens": 42,
            "call": 1,
            "tools": [tool],
            "messages": [system, {"role": "user", "content": prompt}],
            "turns": [{"text": "I look.", "rewards": {}, "observation": [seen]}, {"text": "Many.", "rewards": {}}],
        },
    ]
    return made
