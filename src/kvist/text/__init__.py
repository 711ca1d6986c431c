"""Text on one side, ids on the other: vocabularies, chat templates, and ids back to printable text as they arrive."""
