"""An EAGLE-3 head that trains with the policy whose hidden states it reads."""
