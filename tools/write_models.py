"""Writes docs/models.md from the family table, so that what is said is what runs. ``--check``: only compare.

What was compared is read from the tests' own lists: small models (tests/family_configs.py) and the shapes of published
ones (tests/data/published_configs.json).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvist.spec.facts import DecoderFacts, ExpertFacts, Family
from kvist.spec.families import FAMILIES
from kvist.spec.rules import CacheRule, Every, Periodic, Windowed

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
PUBLISHED = ROOT / "tests" / "data" / "published_configs.json"

_ORDINALS = {2: "second", 6: "sixth"}

HEAD = """\
# Models

<!-- Written by tools/write_models.py from the family table: change the rows, not this page. -->

A family is one row of data on one decoder and one set of kernels; there is no code of a family's own. Every field that
decides something is read from the checkpoint, and what is missing, of a wrong type or out of range is an error with the
field's name. A model is named by a folder, a `.gguf` file (whole or in parts), a hub id (`owner/name`, or
`owner/name@revision`, or a GGUF file in it: `owner/name:Q4_K_M`), `ollama:NAME[:TAG]`, or one of the aliases of
`kvist info`.

## Families that run

| family | `model_type` | GGUF | what a token leaves in a layer | what else is its own | compared |
|---|---|---|---|---|---|
"""

AFTER = """
*Compared* counts small random models that `transformers` made and saved (every tensor random, biases and norms moved
away from 0 and 1): float32 logits of kvist and of `transformers` agree within 1e-4, relative, at each of 300 positions,
on the native and on the reference kernels, past windows, splits of 128 keys and the first range of LongRoPE and YaRN;
in pieces of any size they are equal in every bit. The float64 judge of `kvist verify` is held against the same models,
and where a GGUF file can say it all, the same model written as GGUF too (in the table: + GGUF), by a converter of the
tests' own.
Of real weights only the two that come as packages were run here: SmolLM2 135M (llama) and Gemma 3 270M. The others were
too large for, or out of reach of, the machine that this was built on: nothing is claimed of their text.

*Shapes* are the configs of published models, as published: head counts, widths, rotation, windows, spellings. Two of
their layers with random weights and the first 2,048 words stand in for the model; kvist and `transformers` read the
same config.json, and their float32 logits agree within 1e-4 at every position. The number is how many positions;
windows and LongRoPE's first range are crossed where it says so. `make test-full` runs the large ones.

| family | shapes of | positions | crossed |
|---|---|---|---|
{shapes}
A soft cap where the family has none (`attn_logit_softcapping` in a Gemma 3 or Llama config) is refused: other programs
ignore the field, so a checkpoint cannot have been trained with it. Set it to null to run the model as they do.

What else is refused by name: checkpoints quantised in safetensors (GPTQ, AWQ, MXFP4, bitsandbytes, ...), ALiBi, experts
of other families than those above, encoders, dynamic NTK scaling, and anything that reads beyond the causal mask.
Float8 matrices with a factor for each block (`weight_scale_inv`, DeepSeek-V3's form) are unpacked when they are loaded;
float8 of another form is refused. Latents and experts are read from safetensors only: GGUF files that hold them are
refused.

YaRN serves every family whose config asks for it. Its two factors (`mscale`, `mscale_all_dim`) are taken both or none,
since implementations disagree about one without the other; DeepSeek's softmax scale takes the square of the second.
A factor that is wrong cannot be seen at position 0, so comparisons reach past the first range.

Files are read as if a stranger had made them: headers, configs, vocabularies and chat templates are fuzzed
(`make fuzz`), sizes are checked before anything is allocated, pickles are never opened, and a template runs in a
sandbox with bounded work.

LongRoPE (Phi-3's long variants) has two lists of factors. Elsewhere the list changes when a text outgrows the first
range, which changes keys that are stored already. Here it is fixed when the model is loaded, from `--ctx-size`, and
printed: a longer context than the first range takes the long factors for every position of every request.

`--kv-window N --kv-sinks S` runs any of them in bounded memory: a query sees the first S and the newest N keys, at
their own positions. That is another function than the model's own, and the summary says so.

## Families whose cache can be planned

`kvist plan` knows what these leave behind; they cannot be run yet.

"""


def page() -> str:
    """The whole page."""
    runs = [family for family in FAMILIES if family.decoder is not None]
    plans = [family for family in FAMILIES if family.decoder is None]
    rows = "".join(_row(family, family.decoder) for family in runs if family.decoder is not None)
    planned = "".join(f"- {family.name}: {', '.join(family.model_types)}\n" for family in plans)
    return HEAD + rows + AFTER.replace("{shapes}", _shapes(runs)) + planned


def _shapes(families: list[Family]) -> str:
    """A row for each published config that the tests compare."""
    models = json.loads(PUBLISHED.read_text(encoding="utf-8"))["models"]
    rows = ""
    for family in families:
        for model in (model for model in models if model["config"]["model_type"] in family.model_types):
            length = model.get("length", 300)
            rows += f"| {family.name} | {model['id']} | {length:,} | {_crossed(model['config'], length)} |\n"
    return rows


def _crossed(config: dict[str, Any], length: int) -> str:
    """What lies before the last position that is compared."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    first = config.get("original_max_position_embeddings") if config.get("rope_scaling") else None
    found = [f"window {window:,}"] if window and window < length else []
    found += [f"first range {first:,}"] if first and first < length else []
    return ", ".join(found) or "none"


def _row(family: Family, facts: DecoderFacts) -> str:
    cells = (
        family.name,
        ", ".join(family.model_types),
        ", ".join(family.gguf) or "(llama)" if family.name == "mistral" else ", ".join(family.gguf) or "none",
        _leaves(family.cache, facts),
        "; ".join(_features(facts)) or "nothing",
        _compared(family),
    )
    return f"| {' | '.join(cells)} |\n"


def _leaves(rule: CacheRule, facts: DecoderFacts) -> str:
    if facts.latent is not None:
        return "one latent and one rotated key for all heads ([latent.md](latent.md))"
    heads = "a key and a value per kv head"
    if rule.one_kv_head is not None:
        heads += " (one kv head unless the config says otherwise)"
    if not facts.windows:
        return heads
    match rule.pattern:
        case Periodic(period):
            return f"{heads}; a window on all but every {_ORDINALS.get(period, f'{period}th')} layer"
        case Windowed(gate) if gate is not None:
            return f"{heads}; a window on the layers that `{gate}` switches on"
        case Windowed() | Every():
            return f"{heads}; a window where the config sets one"
    return heads


def _features(facts: DecoderFacts) -> list[str]:
    """What sets the family apart from Llama."""
    found = []
    if facts.norm == "layer":
        found.append("layer norms with bias")
    if not facts.pre_norms:
        found.append("norms behind the branches only")
    elif facts.post_norms:
        found.append("norms around both branches")
    if facts.qk_norm:
        found.append("queries and keys normalised " + ("over all heads" if facts.qk_norm_whole else "per head"))
    if not facts.gated:
        found.append("a feed forward without gate")
    if facts.parallel:
        found.append("parallel branches")
    if facts.learned_positions:
        found.append("learned positions")
    if facts.rotary_factor != 1.0:
        found.append("partial rotation")
    if facts.no_rope_step:
        found.append("layers without rotation")
    if facts.local_rope_theta:
        found.append("another rotation base under windows")
    if facts.scaled_embedding:
        found.append("scaled embedding")
    if facts.multipliers == "granite":
        found.append("multipliers on embedding, attention, residual and logits")
    if facts.multipliers == "depth":
        found.append("multipliers on embedding, residual and logits")
    if facts.latent is not None:
        found.append("queries with a latent of their own where the config sets one")
    if facts.experts is not None:
        found.append(_experts(facts.experts))
    if facts.attn_softcap:
        found.append("soft caps on scores and logits")
    if facts.qkv_bias is True:
        found.append("biases on q, k and v")
    return found


def _experts(facts: ExpertFacts) -> str:
    groups = [score for score in facts.methods.values() if score is not None]
    words = f"experts chosen by {facts.scoring}"
    if groups:
        words += f", {'' if None not in facts.methods.values() else 'perhaps '}within the best groups"
    if facts.correction_bias:
        words += ", with a bias for the choice only"
    return words + (" and shared ones beside them" if facts.shared else "")


def _compared(family: Family) -> str:
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from family_configs import CONFIGS, IN_GGUF
    finally:
        sys.path.pop(0)
    if family.name in ("llama", "gemma3"):
        return "tests/models/test_tiny.py, and real weights"
    counts = Counter(make().model_type for make in CONFIGS.values())
    as_gguf = Counter(CONFIGS[kind]().model_type for kind in IN_GGUF)
    count = sum(counts[name] for name in family.model_types)
    files = sum(as_gguf[name] for name in family.model_types)
    return f"{count} model{'s' * (count != 1)}" + (f", {files} + GGUF" if files else "")


def main() -> int:
    """Write the page, or with --check say whether it is up to date."""
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is not what the rows say: run python tools/write_models.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
