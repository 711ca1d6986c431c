"""Files from strangers, by the million: coverage-guided fuzzing of what kvist reads before it runs anything.

    python tools/fuzz.py config --seconds 120          config.json of every family
    python tools/fuzz.py gguf safetensors vocabulary   in turn, 60 seconds each
    python tools/fuzz.py gguf --replay FILE            one input again, with its traceback
    python tools/fuzz.py gguf --engine atheris         with libFuzzer's engine, where `pip install atheris` was done

An input is interesting when it reaches a line that none before it reached; what is interesting is mutated further. A
finding is anything but an answer or a KvistError, an input that takes more than SECONDS, or one that allocates more
than BYTES. Findings are written to build/fuzz, one file each, and the exit code is 1. Seeds are real headers: the
tests' small models of every family, written by transformers, safetensors and gguf.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS, BYTES = 5.0, 512 << 20  # for one input; real headers take milliseconds and a few MiB
WATCHED = ("/kvist/spec/", "/kvist/text/", "/kvist/model/checkpoint.py", "/kvist/cache/", "/kvist/plan/inputs.py")
SLOW = "took"
NUMBERS = (0, 1, 2, 7, 8, 9, 16, 31, 32, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53)
NUMBERS += (2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e308, float("inf"), float("nan"), 2**31, 2**63)
VALUES += (10**30, "", "x", "\ud800", "full_attention", "sliding_attention", "longrope", "llama3", "linear")
VALUES += ([], [1], [None] * 3, {}, {"x": 1})


@dataclass
class Target:
    """One kind of file: how to read it, what it looks like, and how to change it."""

    name: str
    read: Callable[[bytes], object]
    seeds: list[bytes]
    change: Callable[[random.Random, bytes, bytes], bytes]


def targets(folder: Path) -> dict[str, Callable[[], Target]]:
    """Every target by name; its seeds are made when it is asked for. Inputs are written to ``folder``."""
    sys.path.insert(0, str(ROOT / "tests"))
    import family_configs
    import gguf_files
    import letters
    import published
    from kvist.model.checkpoint import GgufCheckpoint, SafetensorsCheckpoint
    from kvist.spec.cache_from_gguf import gguf_cache_spec
    from kvist.spec.cache_spec import cache_spec
    from kvist.spec.from_config import model_spec, read_config
    from kvist.spec.from_gguf import gguf_model
    from kvist.spec.gguf_split import read_model_file
    from kvist.spec.names import expected_tensors
    from kvist.spec.source import resolve
    from kvist.text.chat import ChatTemplate
    from kvist.text.tokenizer import Tokenizer

    kinds = ("mistral window", "phi3 longrope", "gemma2", "falcon, two norms", "gpt2", "smollm3", "granite", "gpt_neox")

    def configs() -> Target:
        def read(data: bytes) -> None:
            (folder / "config.json").write_bytes(data)
            config = read_config(folder)
            for use in (lambda: names(model_spec(config)), lambda: cache_spec(config)):
                attempt(use)

        made = [make().to_json_string() for make in family_configs.CONFIGS.values()]
        made += [json.dumps(one.config) for one in published.MODELS.values()]
        made += [json.dumps({"model_type": "llava", "text_config": json.loads(made[0])})]
        return Target("config", read, [text.encode() for text in made], change_json)

    def names(spec: Any) -> None:
        if len(spec.layers) < 100:
            expected_tensors(spec)

    def ggufs() -> Target:
        def read(data: bytes) -> None:
            path = folder / "model.gguf"
            path.write_bytes(data)
            file = read_model_file(path)
            attempt(lambda: gguf_cache_spec(file))
            checkpoint = GgufCheckpoint(gguf_model(file))
            for name in checkpoint.names:
                if name.endswith(("norm", "bias")):
                    checkpoint.vector(name)

        made = []
        for kind in kinds:
            model = family_configs.random_model(family_configs.CONFIGS[kind]())
            made.append(gguf_files.save(model, folder / "seed.gguf").read_bytes())
        return Target("gguf", read, made, change_gguf)

    def vocabularies() -> Target:
        def read(data: bytes) -> None:
            path = folder / "model.gguf"
            path.write_bytes(data)
            tokenizer = Tokenizer.from_gguf(read_model_file(path), cache=False)
            ids = tokenizer.encode("Hello, 123 wörld\n")
            tokenizer.decode(ids)
            if tokenizer.has_chat_template:
                attempt(lambda: tokenizer.render_chat([{"role": "user", "content": "x"}]))

        from unit.text import conftest  # the tests' small vocabularies

        made = []
        for header in (conftest.bpe_header(), conftest.spm_header(), conftest.bpe_header(pre="falcon")):
            conftest.write_gguf(folder / "seed.gguf", header, letters.TEMPLATE)
            made.append((folder / "seed.gguf").read_bytes())
        return Target("vocabulary", read, made, change_gguf)

    def templates() -> Target:
        from kvist.text import sandbox
        from unit.text import test_chat  # what published templates do

        sandbox.WORK >>= 8  # lines that are watched take a hundred times as long

        messages = [
            {"role": role, "content": f" {role} {{x}} 5551234567\n"} for role in ("system", "user", "assistant")
        ]

        def read(data: bytes) -> None:
            template = ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>", "eos_token": "</s>"})
            template.render(messages, tools=test_chat.TOOLS)

        made = [text.encode() for text in (*test_chat.USUAL, letters.TEMPLATE)]
        return Target("template", read, made, change_template)

    def safetensors() -> Target:
        import torch
        from safetensors.torch import save

        spec = model_spec(json.loads(family_configs.CONFIGS["mistral"]().to_json_string()))
        whole = save({tensor.name: torch.zeros(tensor.shape) for tensor in expected_tensors(spec).values()})

        def read(data: bytes) -> None:
            path = folder / "model.safetensors"
            path.write_bytes(data)
            checkpoint = SafetensorsCheckpoint(spec, (path,))
            for name in checkpoint.names:
                if name.endswith("norm"):
                    checkpoint.vector(name)

        return Target("safetensors", read, [whole], change_safetensors)

    def folders() -> Target:
        """The small files beside the weights: index, generation settings, tokenizer settings, template."""
        letters.save(folder / "model")
        (folder / "model" / "model.safetensors").touch()
        (folder / "model" / "config.json").write_text(family_configs.CONFIGS["mistral"]().to_json_string())
        files = ("model.safetensors.index.json", "generation_config.json", "tokenizer_config.json")
        files += ("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "tokenizer.json")

        def read(data: bytes) -> None:
            which = files[data[0] % len(files)] if data else files[0]
            path = folder / "model" / which
            before = path.read_bytes() if path.exists() else None
            try:
                path.write_bytes(data[1:])
                attempt(lambda: resolve(str(folder / "model")).shards())
                attempt(lambda: model_spec(folder / "model"))
                tokenizer = Tokenizer.from_folder(folder / "model")
                tokenizer.decode(tokenizer.encode("Hello"))
                if tokenizer.has_chat_template:
                    tokenizer.render_chat([{"role": "user", "content": "x"}])
            finally:
                path.unlink() if before is None else path.write_bytes(before)

        texts = ['{"weight_map": {"a": "model.safetensors"}}', '{"eos_token_id": [1, 2]}', '{"add_bos_token": true}']
        texts += ['{"bos_token": {"content": "a"}}', letters.TEMPLATE, '{"chat_template": "{{ messages }}"}']
        texts += [(folder / "model" / "tokenizer.json").read_text()]
        made = [bytes([i]) + text.encode() for i, text in enumerate(texts)]
        return Target("folder", read, made, lambda draw, a, b: a[:1] + change_json(draw, a[1:], b[1:]))

    return {
        "config": configs,
        "gguf": ggufs,
        "vocabulary": vocabularies,
        "template": templates,
        "safetensors": safetensors,
        "folder": folders,
    }


GGUF_WORDS = [b"GGUF", b"general.alignment", b"general.architecture", b"split.count", b"split.no", b"llama.block_count"]
GGUF_WORDS += [b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type"]


def attempt(use: Callable[[], object]) -> None:
    """Several readers look at one input: an error of ours in one does not keep the next from looking."""
    from kvist.base.errors import KvistError

    try:
        use()
    except KvistError as error:
        assert str(error)


# Changes of an input. ``other`` is another interesting one.


def change_bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Bits, numbers, pieces moved, cut, doubled, or taken from elsewhere."""
    raw = bytearray(data)
    for _ in range(1 + draw.randrange(4)):
        # Headers stand in front, and most of what can go wrong.
        most = max(1, min(len(raw), draw.choice((64, 512, 4096, len(raw) or 1))))
        at = draw.randrange(most)
        match draw.randrange(9):
            case 0:
                raw[at : at + 1] = bytes([(raw[at] if at < len(raw) else 0) ^ 1 << draw.randrange(8)])
            case 1:
                raw[at : at + 1] = bytes([draw.randrange(256)])
            case 2:
                raw[at : at + 8] = struct.pack("<Q", draw.choice(NUMBERS))
            case 3:
                raw[at : at + 4] = struct.pack("<I", draw.choice(NUMBERS) % 2**32)
            case 4:
                del raw[at : at + 1 + draw.randrange(16)]
            case 5:
                raw[at:at] = raw[at : at + 1 + draw.randrange(64)]
            case 6:
                source = draw.randrange(max(1, len(other)))
                raw[at : at + draw.randrange(64)] = other[source : source + draw.randrange(64)]
            case 7:
                raw[at:at] = draw.choice(GGUF_WORDS)
            case 8:
                del raw[draw.randrange(len(raw) + 1) :]
    return bytes(raw)


def change_gguf(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Pairs and tensors of the header changed one by one, so that what is behind the header is reached as well."""
    if draw.random() < 0.3:
        return change_bytes(draw, data, other)
    try:
        header, theirs = Header.read(data), Header.read(other)
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError):
        return change_bytes(draw, data, other)
    for _ in range(1 + draw.randrange(3)):
        header.change(draw, theirs)
    return header.write()


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Header:
    """A GGUF file taken apart: pairs (key, type, element type, values) and tensors (name, extents, type, offset)."""

    version: int
    pairs: list[tuple[bytes, int, int, list[Any]]]
    tensors: list[tuple[bytes, list[int], int, int]]
    alignment: int
    rest: bytes

    @classmethod
    def read(cls, data: bytes) -> Header:
        """Take ``data`` apart; an error of any kind when it is not whole."""
        at = 4

        def take(form: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from(f"<{form}", data, at)
            at += struct.calcsize(f"<{form}")
            return value

        def text() -> bytes:
            nonlocal at
            size = take("Q")
            if size > len(data):
                raise ValueError
            at += size
            return data[at - size : at]

        def values(kind: int, count: int) -> list[Any]:
            if count > 100_000:
                raise ValueError
            return [text() if kind == 8 else take(SCALARS[kind]) for _ in range(count)]

        version, num_tensors, num_pairs = take("I"), take("Q"), take("Q")
        pairs = []
        for _ in range(min(num_pairs, 1000)):
            key, kind = text(), take("I")
            element = take("I") if kind == 9 else kind
            pairs.append((key, kind, element, values(element, take("Q") if kind == 9 else 1)))
        tensors = []
        for _ in range(min(num_tensors, 1000)):
            name, rank = text(), take("I")
            tensors.append((name, [take("Q") for _ in range(min(rank, 8))], take("I"), take("Q")))
        return cls(version, pairs, tensors, 32, data[-(-at // 32) * 32 :])

    def write(self) -> bytes:
        """Put together again, whatever it says now."""

        def text(value: Any) -> bytes:
            raw = value if isinstance(value, bytes) else str(value).encode(errors="replace")
            return struct.pack("<Q", len(raw)) + raw

        def packed(kind: int, value: Any) -> bytes:
            if kind not in SCALARS:
                return text(value)
            try:
                return struct.pack(f"<{SCALARS[kind]}", value)
            except (struct.error, OverflowError):
                return bytes(struct.calcsize(f"<{SCALARS[kind]}"))

        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.pairs))
        for key, kind, element, values in self.pairs:
            out += text(key) + struct.pack("<I", kind)
            out += struct.pack("<IQ", element, len(values)) if kind == 9 else b""
            out += b"".join(packed(element, value) for value in values)
        for name, extents, kind, offset in self.tensors:
            out += text(name) + struct.pack(
                f"<I{len(extents)}QIQ", len(extents), *(extent % 2**64 for extent in extents), kind, offset
            )
        return out + bytes(-len(out) % self.alignment) + self.rest

    def change(self, draw: random.Random, other: Header) -> None:
        """One thing about it."""
        if self.tensors and draw.random() < 0.3:
            at = draw.randrange(len(self.tensors))
            name, extents, kind, offset = self.tensors[at]
            match draw.randrange(5):
                case 0:
                    del self.tensors[at]
                case 1:
                    self.tensors[at] = (draw.choice(self.tensors)[0], extents, kind, offset)
                case 2:
                    extents = [
                        draw.choice((extent, extent * 2, extent // 2, draw.choice(NUMBERS))) for extent in extents
                    ]
                    self.tensors[at] = (name, extents, kind, offset)
                case 3:
                    self.tensors[at] = (name, extents, draw.choice((0, 1, 2, 8, 12, 14, 24, 30, 39)), offset)
                case 4:
                    self.tensors.append(draw.choice(other.tensors or self.tensors))
            return
        if not self.pairs:
            self.pairs += other.pairs
            return
        at = draw.randrange(len(self.pairs))
        key, kind, element, values = self.pairs[at]
        match draw.randrange(7):
            case 0:
                del self.pairs[at]
            case 1 if other.pairs:
                self.pairs.append(draw.choice(other.pairs))
            case 2:
                self.pairs[at] = (draw.choice(self.pairs)[0], kind, element, values)
            case 3:
                kind = draw.choice((0, 4, 5, 6, 7, 8, 10, 11, 12))
                self.pairs[at] = (key, kind, kind, [draw.choice(VALUES) or 0])
            case 4:
                number = draw.choice((*NUMBERS, -1, 0.5, float("nan"), float("inf"), b"", b"llama", b"\xff"))
                self.pairs[at] = (key, kind, element, [number, *values[1:]])
            case 5:
                start, stop = sorted((draw.randrange(len(values) + 1), draw.randrange(len(values) + 1)))
                self.pairs[at] = (key, 9, element, values[start:stop] * draw.choice((1, 1, 2)))
            case 6 if len(values) > 1:
                i, j = draw.randrange(len(values)), draw.randrange(len(values))
                values = [*values]
                values[i], values[j] = values[j], draw.choice((values[i], b"", b"a b", b" ", 0, 3, -1))
                self.pairs[at] = (key, kind, element, values)


def change_json(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """A value, a name or a nesting somewhere in the document; now and then its bytes."""
    if draw.random() < 0.15:
        return change_bytes(draw, data, other)
    try:
        document, donor = json.loads(data), json.loads(other)
    except (ValueError, RecursionError):
        return change_bytes(draw, data, other)
    for _ in range(1 + draw.randrange(3)):
        document = _changed(draw, document, donor)
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):
        return data


def _changed(draw: random.Random, document: Any, donor: Any) -> Any:
    if isinstance(document, dict) and document and draw.random() < 0.9:
        name = draw.choice(list(document))
        match draw.randrange(6):
            case 0:
                return {k: v for k, v in document.items() if k != name}
            case 1 if isinstance(donor, dict):
                return {**document, **dict(draw.sample(sorted(donor.items()), min(2, len(donor))))}
            case 2:
                return {**document, draw.choice(list(document)) + draw.choice(("", "_")): document[name]}
            case _:
                return {**document, name: _changed(draw, document[name], donor)}
    if isinstance(document, list) and document and draw.random() < 0.7:
        at = draw.randrange(len(document))
        match draw.randrange(4):
            case 0:
                return document[:at] + document[at + 1 :]
            case 1:
                return document + document[at:]
            case _:
                return [*document[:at], _changed(draw, document[at], donor), *document[at + 1 :]]
    if isinstance(document, int | float) and not isinstance(document, bool) and draw.random() < 0.5:
        return draw.choice((-document, document + 1, document - 1, document * 2, document / 2, float(document)))
    return draw.choice(VALUES)


def change_template(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """Words of one template among those of another: what stands between braces stays together."""
    words, theirs = (re.findall(rb"\{[{%].*?[}%]\}|[^{]+|.", text, re.DOTALL) for text in (data, other))
    for _ in range(1 + draw.randrange(4)):
        at = draw.randrange(len(words) + 1)
        match draw.randrange(5):
            case 0:
                del words[at : at + 1]
            case 1 if theirs:
                words[at:at] = [draw.choice(theirs)]
            case 2:
                words[at:at] = words[at : at + draw.randrange(6)]
            case 3 if words:
                at = draw.randrange(len(words))
                pieces = re.findall(rb"\w+|\W", words[at])
                pieces[draw.randrange(len(pieces))] = draw.choice(TEMPLATE_WORDS)
                words[at] = b"".join(pieces)
            case 4:
                words[at:at] = [b"{% for q in range(99999) %}", *words[at:], b"{% endfor %}"]
    return b"".join(words)[:20_000]


TEMPLATE_WORDS = [b"messages", b"range(99999)", b"99999999", b"'a' * 9999", b"+", b"*", b"~", b"|", b"join", b"replace"]
TEMPLATE_WORDS += [b"format", b"tojson", b"loop", b"ns", b"__class__", b"attr", b"[", b"]", b"(", b")", b"-1", b"none"]


def change_safetensors(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """The header's fields, its stated length, or anything."""
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.2 or not 0 < size < len(data):
        return change_bytes(draw, data, other)
    theirs = int.from_bytes(other[:8], "little")
    header = change_json(draw, data[8 : 8 + size], other[8 : 8 + theirs] if theirs < len(other) else b"{}")
    return struct.pack("<Q", len(header) if draw.random() < 0.9 else draw.choice(NUMBERS)) + header + data[8 + size :]


# Running.


class Lines:
    """Which pairs of neighbouring lines of the watched files an input ran through."""

    def __init__(self) -> None:
        self.known: set[tuple[CodeType, int, int]] = set()
        self.now: set[tuple[CodeType, int, int]] = set()
        self.last = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Lines | None:
        """A tracer for ``sys.settrace``."""
        if event == "call":
            return self if any(part in frame.f_code.co_filename for part in WATCHED) else None
        if event == "line":
            self.now.add((frame.f_code, self.last, frame.f_lineno))
            self.last = frame.f_lineno
        return self

    def new(self) -> bool:
        """Whether the input that just ran went where none went before."""
        fresh = not self.now <= self.known
        self.known |= self.now
        self.now = set()
        return fresh


def run_one(target: Target, data: bytes) -> str | None:
    """What is wrong with how ``data`` was taken; None when it was answered or refused."""
    from kvist.base.errors import KvistError

    begin = time.process_time()
    try:
        target.read(data)
    except KvistError as error:
        if not str(error):
            return "an error without words"
    except Exception:
        return traceback.format_exc()
    spent = time.process_time() - begin
    return f"{SLOW} {spent:.1f} s" if spent > SECONDS else None


def limit_memory() -> None:
    """An allocation beyond BYTES fails, which is then a finding."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        now = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, resource.RLIM_INFINITY))


def fuzz(target: Target, seconds: float, seed: int, found: Path) -> int:
    """Mutate for ``seconds``; how many findings there were."""
    draw, lines, corpus = random.Random(seed), Lines(), list(target.seeds)
    findings: set[str] = set()
    count, begin = 0, time.monotonic()
    queue = list(corpus)
    while time.monotonic() - begin < seconds:
        data = queue.pop() if queue else target.change(draw, draw.choice(corpus), draw.choice(corpus))
        lines.last = 0
        sys.settrace(lines)
        try:
            wrong = run_one(target, data)
        finally:
            sys.settrace(None)
        count += 1
        if wrong is not None and wrong.startswith(SLOW):
            wrong = run_one(target, data)  # without being watched, which takes most of the time
        if lines.new() and data not in target.seeds:
            corpus.append(data)
        if wrong is not None:
            where = wrong.strip().splitlines()
            place = "\n".join([*[line for line in where if "/kvist/" in line][-2:], where[-1].split(":")[0]])
            if place not in findings:
                findings.add(place)
                found.mkdir(parents=True, exist_ok=True)
                path = found / f"{target.name}-{len(findings)}"
                path.write_bytes(data)
                print(f"\n{target.name}: {path}\n{wrong}", file=sys.stderr)
    spent = time.monotonic() - begin
    print(
        f"{target.name}: {count} inputs in {spent:.0f} s, {len(corpus)} interesting, {len(lines.known)} line pairs, "
        f"{len(findings)} findings (seed {seed})"
    )
    return len(findings)


def fuzz_with_atheris(name: str, folder: Path, seconds: float, found: Path) -> int:
    """The same target under libFuzzer, which stops at the first finding; its input is then in ``found``."""
    import atheris  # not a dependency: its wheels are large, and rarely there for a new Python

    with atheris.instrument_imports(include=["kvist"]):
        target = targets(folder)[name]()
    found.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus"
    corpus.mkdir()
    for index, data in enumerate(target.seeds):
        (corpus / str(index)).write_bytes(data)

    def one(data: bytes) -> None:
        wrong = run_one(target, data)
        if wrong is not None:
            raise RuntimeError(wrong)

    def change(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        return atheris.Mutate(data, most) if draw.random() < 0.3 else target.change(draw, data, data)[:most]

    arguments = [sys.argv[0], f"-max_total_time={seconds:.0f}", "-max_len=600000", f"-artifact_prefix={found}/{name}-"]
    atheris.Setup([*arguments, str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("config", "gguf", "vocabulary", "template", "safetensors", "folder")
    parser.add_argument("target", nargs="*", choices=[*names, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    parser.add_argument("--replay", type=Path, help="run one input and show what happens")
    parser.add_argument("--found", type=Path, default=ROOT / "build" / "fuzz")
    options = parser.parse_args()
    chosen = options.target or list(names)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.engine == "atheris":
            return fuzz_with_atheris(chosen[0], folder, options.seconds, options.found)
        total = 0
        made = [targets(folder)[name]() for name in chosen]
        if options.replay is not None:
            wrong = run_one(made[0], options.replay.read_bytes())
            print(wrong or "answered, or refused by name")
            return int(wrong is not None)
        limit_memory()
        for target in made:
            total += fuzz(target, options.seconds, options.seed, options.found)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
