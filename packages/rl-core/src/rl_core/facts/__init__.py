"""Facts of models and of libraries, for processes that do not load them."""
