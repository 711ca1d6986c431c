"""What a model is: frozen facts read from config.json or a GGUF header. No torch, no transformers."""
