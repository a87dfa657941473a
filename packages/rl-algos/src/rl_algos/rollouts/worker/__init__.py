"""What makes a rollout beside a generator: conversations, chat templates and programs."""
