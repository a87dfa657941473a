"""A head that trains with the policy whose hidden states it reads: EAGLE-3, or for multi-token prediction."""
