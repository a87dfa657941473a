"""Vision-language models: the images of rows on the host, the tower's features among the tokens, and the parts that
train."""
