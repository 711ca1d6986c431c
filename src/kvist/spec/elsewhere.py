"""Models that other programs keep or fetch: hub repositories and what ollama has pulled."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from kvist.base.errors import Corrupt, UsageError

HUB_ID = re.compile(r"^(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?$")
OLLAMA = "ollama:"
# What runs a model, from the top folder of a repository only. Pickles are never fetched.
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja")
_UNWANTED = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth")
_OLLAMA_NAME = re.compile(r"^(?P<parts>[\w][\w.-]*(/[\w][\w.-]*){0,2})(:(?P<tag>[\w][\w.-]*))?$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_MANIFEST_LIMIT = 1 << 20  # bytes; real ones have under a thousand
_WEIGHTS = "application/vnd.ollama.image.model"


def hub_folder(name: str) -> Path:
    """The folder of hub repository ``owner/name`` or ``owner/name@revision``: fetched, or as the hub's cache has it.

    What is there already is not fetched again, and a broken-off download goes on where it stopped. UsageError, with the
    cause and the remedy, when it cannot be had.
    """
    match = HUB_ID.match(name)
    if match is None:
        raise UsageError(f"{name!r} is no hub id: write owner/name, or owner/name@revision")
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

    try:
        found = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=Bar,
        )
    except Exception as error:  # which ones its HTTP client raises changes with the hub's version
        raise UsageError(f"cannot get {name!r} from the hub: {_cause(error)}") from error
    return Path(str(found))


def _cause(error: Exception) -> str:
    """What went wrong, in the words of who asked, with the remedy."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return "the repository is gated: accept its terms on its page, and log in with `hf auth login`"
    if kind in ("RepositoryNotFoundError", "RemoteEntryNotFoundError"):
        return "there is no such repository, or it is private: check the name, or log in with `hf auth login`"
    if kind == "RevisionNotFoundError":
        return "there is no such revision: leave @revision out, or name a branch, tag or commit that exists"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "IncompleteSnapshotError", "ConnectionError"):
        return (
            "the hub cannot be reached (or HF_HUB_OFFLINE is set) and this machine's hub cache does not hold it: "
            "fetch it once while online, or give a folder or a .gguf file"
        )
    lines = str(error).strip().splitlines()
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
