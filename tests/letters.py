"""A real tokenizer of 61 ids, bytes of letters, of half characters, and one end token, as a folder has it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZE = 61
END = 60
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def save(folder: Path, template: str | None = TEMPLATE) -> Path:
    """tokenizer.json and its settings in ``folder``."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!"
    # The byte alphabet's names of a space and of the bytes of é and of half an emoji.
    symbols = [*letters, "Ġ", "Ã", "©", "ð", "Ł"]
    assert len(symbols) == END
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "add_bos_token": False}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
