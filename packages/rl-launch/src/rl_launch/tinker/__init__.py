"""A server of training steps for programs of the `tinker` client, over the models of a recipe."""
