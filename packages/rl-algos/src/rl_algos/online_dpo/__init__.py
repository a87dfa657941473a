"""Online DPO: preferences between the policy's own rollouts, by their rewards."""
