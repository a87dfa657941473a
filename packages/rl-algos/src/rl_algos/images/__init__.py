"""Images in conversations: the tokens that a model reads for each, without torch and without decoding a pixel."""
