"""The only wiring: a model's path and settings become an engine with text on both sides.

llm = load("smollm2")
llm.generate("The capital of France is").text
for piece in llm.stream("Once upon a time", temperature=0.8): ...
"""

from kvist.compose.llm import LLM, Completion, Prompt, Setup, Stream
from kvist.compose.wiring import default_context, load, open_model

__all__ = ["LLM", "Completion", "Prompt", "Setup", "Stream", "default_context", "load", "open_model"]
