"""Direct preference optimisation and its kin: a policy learns from comparisons of responses, without rollouts."""
