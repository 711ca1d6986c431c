"""Ground floor: the exception tree and element types. Imports nothing of ours and no torch."""
