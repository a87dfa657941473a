"""Generation by servers that somebody else runs: vLLM's and SGLang's, over HTTP."""
