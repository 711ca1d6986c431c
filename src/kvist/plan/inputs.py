"""What a user calls MODEL, as facts for the planner: headers and configs are read, never weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvist.base.errors import FormatError, KvistError, UsageError
from kvist.spec.cache_from_gguf import gguf_cache_spec
from kvist.spec.cache_spec import cache_spec
from kvist.spec.elsewhere import HUB_ID, OLLAMA, hub_config, hub_path
from kvist.spec.from_config import model_spec, read_config
from kvist.spec.from_gguf import gguf_model
from kvist.spec.gguf_split import read_model_file
from kvist.spec.kept import CacheSpec
from kvist.spec.names import ExpectedTensor, expected_tensors
from kvist.spec.source import ALIASES, expanded, resolve

Model = str | Path | Mapping[str, Any] | CacheSpec


def load_spec(model: Model, assume_standard: bool = False) -> tuple[str, CacheSpec]:
    """(name, facts) of an alias, a GGUF file, a config.json, its folder, a hub id, a mapping, or facts themselves."""
    if isinstance(model, CacheSpec):
        return model.architecture, model
    if isinstance(model, Mapping):
        return str(model.get("_name_or_path") or "config"), _from_config(model, assume_standard)
    text = str(model)
    if not text:
        raise UsageError("the model's name is empty: give a folder, a .gguf file, a hub id, or an alias")
    if text in ALIASES and not Path(text).exists():
        return text, _from_gguf(resolve(text).path)
    path = expanded(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            if not files:
                raise UsageError(f"{path} has no config.json: give a folder that has one, or a .gguf file")
            if len(files) > 1:
                raise UsageError(f"{path} has no config.json and {len(files)} GGUF files: name the file to plan")
            return files[0].name, _from_gguf(files[0])
        return path.resolve().name, _with_files(_from_config(read_config(path), assume_standard), path)
    if path.is_file():
        return _file(path, assume_standard)
    if text.startswith(OLLAMA):
        return text, _from_gguf(resolve(text).path)
    hub = HUB_ID.match(text)
    if hub is not None and hub["file"] is not None:
        return text, _from_gguf(hub_path(text, local=True))  # a plan fetches no weights
    if hub is not None:
        return text, _from_config(read_config(hub_config(text)), assume_standard)
    raise UsageError(
        f"no such model: {text!r} is neither a file or folder, nor a hub id (owner/name), nor ollama:NAME, nor one of"
        f" {', '.join(ALIASES)}"
    )


def _file(path: Path, assume_standard: bool) -> tuple[str, CacheSpec]:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return path.name, _from_gguf(path)
    if path.suffix == ".json":
        return path.resolve().parent.name if path.name == "config.json" else path.stem, _from_config(
            read_config(path), assume_standard
        )
    hint = f"; did you mean its folder, {path.parent}?" if path.with_name("config.json").is_file() else ""
    raise FormatError(f"{path} is neither a GGUF file nor a config.json{hint}")


def _from_config(config: Mapping[str, Any], assume_standard: bool) -> CacheSpec:
    spec = cache_spec(config, assume_standard=assume_standard)
    if not spec.runnable:
        return spec
    try:
        runnable = model_spec(config)
        tensors = expected_tensors(runnable)
    except KvistError:
        return spec  # An abridged config can be planned; what only running needs is missing.
    count, vectors = _count(tensors)
    if runnable.fp8_block is not None:  # norms, embeddings and factors are not float8: the estimate stands
        return replace(spec, parameters=count, vectors=vectors)
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(spec.dtype or "", 2)
    told = f"exact: {count:,} elements x {width} B ({spec.dtype or '16 bits assumed'})"
    return replace(spec, parameters=count, vectors=vectors, weights_bytes=count * width, weights_source=told)


def _count(tensors: Mapping[str, ExpectedTensor]) -> tuple[int, int]:
    """(all elements, those in vectors) of a model that can be run; a tied head counts once."""
    loaded = [tensor.shape for tensor in tensors.values() if not tensor.optional]
    return sum(map(math.prod, loaded)), sum(shape[0] for shape in loaded if len(shape) == 1)


def _from_gguf(path: Path) -> CacheSpec:
    file = read_model_file(path)
    spec = gguf_cache_spec(file)
    shapes = [tensor.shape for tensor in file.tensors.values()]
    count, vectors = sum(map(math.prod, shapes)), sum(shape[0] for shape in shapes if len(shape) == 1)
    if spec.runnable:
        try:
            count, vectors = _count(expected_tensors(gguf_model(file).spec, "gguf"))
        except KvistError as error:
            spec = replace(spec, runnable=False, notes=(*spec.notes, f"kvist cannot run it: {error}"))
    return replace(spec, parameters=count, vectors=vectors)


def _with_files(spec: CacheSpec, folder: Path) -> CacheSpec:
    """With the bytes of the folder's own tensors, where they lie beside the config."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return spec
    sizes = [file.stat().st_size - _header_bytes(file) for file in files]
    if min(sizes) < 0:  # not the files themselves: what a broken-off download or a clone without Git LFS left
        return replace(
            spec, notes=(*spec.notes, f"{files[sizes.index(min(sizes))].name} is not a whole safetensors file")
        )
    size = sum(sizes)
    return replace(spec, weights_bytes=size, weights_source=f"exact: the tensors of {len(files)} files")


def _header_bytes(file: Path) -> int:
    """Length of a safetensors header: eight bytes that say how long the rest is."""
    with file.open("rb") as stream:
        first = stream.read(8)
    return 8 + int.from_bytes(first, "little") if len(first) == 8 else 0
