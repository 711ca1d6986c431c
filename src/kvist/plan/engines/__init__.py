"""How engines round, pad and group: each one turns the same layers into the bytes it allocates."""
