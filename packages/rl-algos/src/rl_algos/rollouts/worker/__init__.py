"""The parts of a rollout other than the generator: conversations, chat templates and programs."""
