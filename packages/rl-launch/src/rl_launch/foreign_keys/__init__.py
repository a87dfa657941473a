"""Keys of other systems, as data: what each is here. `rl config import` and messages about unknown keys read them."""
