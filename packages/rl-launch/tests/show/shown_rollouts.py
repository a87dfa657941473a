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
