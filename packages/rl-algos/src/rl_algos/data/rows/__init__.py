"""How a row becomes an example: messages, processors, templates."""
