"""How fast this machine runs a model, each figure beside the limit that it cannot pass."""
