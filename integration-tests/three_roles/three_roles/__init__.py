"""An algorithm of a third party: a policy and a critic that train, and a frozen teacher."""
