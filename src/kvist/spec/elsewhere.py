"""Models that other programs keep or fetch: hub repositories and what ollama has pulled."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvist.base.errors import Corrupt, UsageError

# owner/name, then @revision, then :file.gguf or the name of a quantisation (:Q4_K_M).
HUB_ID = re.compile(r"^(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<file>\w[\w./-]*))?$")
OLLAMA = "ollama:"
# What runs a model, from the top folder of a repository only. Pickles are never fetched.
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja")
_UNWANTED = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth")
_UNREACHABLE = (
    "the hub cannot be reached (or HF_HUB_OFFLINE is set) and this machine's hub cache does not hold it: "
    "fetch it once while online, or give a folder or a .gguf file"
)
_NOT_HERE = (
    "this machine's hub cache does not hold it, and a plan fetches no weights: fetch it (kvist run, or hf download), "
    "or plan the repository that it was made from"
)
_NO_CONNECTION = (
    *("LocalEntryNotFoundError", "OfflineModeIsEnabled", "IncompleteSnapshotError"),
    *("ConnectionError", "ConnectError", "ProxyError"),
)
_PARTS = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_OLLAMA_NAME = re.compile(r"^(?P<parts>[\w][\w.-]*(/[\w][\w.-]*){0,2})(:(?P<tag>[\w][\w.-]*))?$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_MANIFEST_LIMIT = 1 << 20  # bytes; real ones have under a thousand
_WEIGHTS = "application/vnd.ollama.image.model"


def hub_path(name: str, *, local: bool = False) -> Path:
    """What hub id ``owner/name[@revision][:file]`` names: the repository's folder, or with ``:file`` one GGUF file.

    ``file`` is a file's name, or a word of it that only one model has (``Q4_K_M``). All is fetched, or as the hub's
    cache has it: what is there already is not fetched again, and a transfer that breaks off goes on where it stopped
    (a process that was ended leaves whole files only).
    ``local``: nothing is fetched. UsageError, with the cause and the remedy, when it cannot be had.
    """
    match = _match(name)
    if match["file"] is None:
        folder = _fetch(name, _WANTED, _UNWANTED, _NOT_HERE if local else None)
        if not (folder / "config.json").is_file():
            there = _gguf_names(name, local)
            remedy = f"it has GGUF files: write {name}:FILE with one of {_listed(there)}" if there else "take another"
            raise UsageError(f"{name!r} has no config.json: {remedy}")
        return folder
    there = _gguf_names(name, local)
    chosen = _choose(name, match["file"], there)
    # A name is no pattern, whatever characters it has.
    folder = _fetch(name, [re.sub(r"([*?\[])", r"[\1]", file) for file in chosen], (), _NOT_HERE if local else None)
    if not all((folder / file).is_file() for file in chosen):
        raise UsageError(f"cannot get {name!r} from the hub: {_UNREACHABLE}")
    return folder / chosen[0]


def hub_config(name: str) -> Path:
    """The config.json of a hub repository, and nothing else of it. UsageError as ``hub_path``."""
    path = _fetch(name, ["config.json"]) / "config.json"
    if not path.is_file():
        raise UsageError(
            f"cannot plan {name!r}: it has no config.json, or {_UNREACHABLE}; a GGUF file can be planned by its path"
        )
    return path


def _match(name: str) -> re.Match[str]:
    match = HUB_ID.match(name)
    if match is None:
        raise UsageError(f"{name!r} is no hub id: write owner/name, owner/name@revision, or owner/name:file.gguf")
    return match


def _fetch(name: str, wanted: Sequence[str], unwanted: Sequence[str] = (), closed: str | None = None) -> Path:
    """The folder of a repository's files that are ``wanted``. ``closed``: why the hub is not asked, but its cache."""
    match = _match(name)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import tqdm
    except ImportError as error:
        raise UsageError(f"{name!r} looks like a hub id: install huggingface_hub to fetch it") from error

    class Bar(tqdm):
        """The hub's progress, on a terminal only."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            settings["disable"] = not sys.stderr.isatty()
            super().__init__(*args, **settings)  # type: ignore[no-untyped-call]

    log = logging.getLogger("huggingface_hub")
    level = log.level
    try:
        log.setLevel(logging.ERROR)  # what it warns of is told here, with what to do
        found = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
            tqdm_class=Bar,
            local_files_only=closed is not None,
        )
    except Exception as error:  # which ones its HTTP client raises changes with the hub's version
        raise UsageError(
            f"cannot get {name!r} from the hub, and no file or folder here is called so: {closed or _cause(error)}"
        ) from error
    finally:
        log.setLevel(level)
    return Path(str(found))


def _gguf_names(name: str, local: bool) -> list[str]:
    """Every GGUF file of a repository: as the hub lists them, or as its cache has them when it cannot be reached."""
    match, names = _match(name), None
    if not local:
        try:
            from huggingface_hub import HfApi

            files = HfApi().model_info(match["repo"], revision=match["revision"]).siblings or []
            names = [file.rfilename for file in files]
        except Exception as error:  # as above
            cause = _cause(error)
            if cause is not _UNREACHABLE:
                raise UsageError(f"cannot get {name!r} from the hub: {cause}") from error
    if names is None:
        # Nothing more is wanted than to know where it is.
        folder = _fetch(name, (), (), _NOT_HERE if local else _UNREACHABLE)
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    return sorted(file for file in names if file.lower().endswith(".gguf") and ".." not in file.split("/"))


def _choose(name: str, wanted: str, there: Sequence[str]) -> tuple[str, ...]:
    """The file that ``wanted`` names, or its parts in order. UsageError unless it is one model."""
    word = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
    # A repository keeps the part of a model that sees images in a file of its own.
    models = [file for file in there if not file.rsplit("/", 1)[-1].lower().startswith("mmproj")]
    found = [file for file in there if file == wanted] or [file for file in models if word.search(file)]
    named = list({_PARTS.sub("", file): file for file in reversed(found)}.values())[::-1]  # the first part of each
    if len(named) > 1:
        raise UsageError(f"{name!r} names {len(named)} models: {_listed(named)}; write one of them after the colon")
    if not found:
        listed = f"it has {_listed(models)}" if models else "it has none: leave the part after the colon out"
        raise UsageError(f"{name!r} names no GGUF file of the repository: {listed}")
    parts = _PARTS.search(found[0])
    if parts is None:
        return tuple(found)
    return tuple(file for file in there if _PARTS.sub("", file) == _PARTS.sub("", found[0]))


def _listed(files: Sequence[str]) -> str:
    return ", ".join(files[:12]) + (f" and {len(files) - 12} more" if len(files) > 12 else "")


def _cause(error: Exception) -> str:
    """What went wrong, in the words of who asked, with the remedy."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return "the repository is gated: accept its terms on its page, and log in with `hf auth login`"
    if kind in ("RepositoryNotFoundError", "RemoteEntryNotFoundError"):
        return "there is no such repository, or it is private: check the name, or log in with `hf auth login`"
    if kind == "RevisionNotFoundError":
        return "there is no such revision: leave @revision out, or name a branch, tag or commit that exists"
    if kind in _NO_CONNECTION or kind.endswith("Timeout"):
        return _UNREACHABLE
    lines = str(error).strip().splitlines()
    if kind in ("RemoteProtocolError", "ReadError"):
        return (
            f"the transfer broke off again and again ({lines[0] if lines else kind}): run this again, whole files stay"
        )
    return f"{lines[0] if lines else kind}; give a folder or a .gguf file instead"


def ollama_file(name: str) -> Path:
    """The GGUF file of ``NAME[:TAG]`` that ollama has pulled, found by its manifest. UsageError when it is not here."""
    match = _OLLAMA_NAME.match(name)
    if match is None:
        raise UsageError(f"{name!r} is no ollama model: write ollama:NAME or ollama:NAME:TAG")
    parts = match["parts"].split("/")
    parts = [*["registry.ollama.ai", "library"][: 3 - len(parts)], *parts]
    roots = _ollama_roots()
    for root in roots:
        manifest = root.joinpath("manifests", *parts, match["tag"] or "latest")
        if manifest.is_file():
            return _blob(root, manifest, name)
    looked = ", ".join(str(root) for root in roots)
    raise UsageError(f"ollama has no model {name!r} here (looked in {looked}): `ollama pull {name}` fetches it")


def _ollama_roots() -> list[Path]:
    chosen = os.environ.get("OLLAMA_MODELS")
    return [Path(chosen)] if chosen else [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _blob(root: Path, manifest: Path, name: str) -> Path:
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(_MANIFEST_LIMIT))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"{manifest} is no ollama manifest ({error}): `ollama pull {name}` writes it again") from error
    # A digest becomes a file name: nothing but a digest may.
    if len(digests) != 1 or not isinstance(digests[0], str) or not _DIGEST.match(digests[0]):
        raise UsageError(f"ollama's {name!r} has {len(digests)} files of weights ({manifest}): one can be run")
    path = root / "blobs" / digests[0].replace(":", "-")
    if not path.is_file():
        raise UsageError(f"{path} is missing, which ollama's {name!r} needs: `ollama pull {name}` fetches it")
    return path
