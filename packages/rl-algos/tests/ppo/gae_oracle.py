"""GAE written from its paper."""


def written_out(rewards, values, mask, last_value, gamma, lam):
    """GAE of one row by its recursion, backwards over the tokens that were sampled."""
    advantages = [0.0] * len(mask)
    following, carried = last_value, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            carried = float(rewards[t]) + gamma * following - float(values[t]) + gamma * lam * carried
            advantages[t], following = carried, float(values[t])
    return advantages
