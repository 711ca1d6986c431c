"""``kvist info``: the machine, the kernels it gets, and the models that are here."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

# What of the processor's flags decides between kernels, best first.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "fma", "sve", "asimd")


def command(
    model: Annotated[
        str | None, typer.Argument(help="A file, a folder, smollm2 or gemma3: say what it holds.", metavar="MODEL")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what this machine has: processors, memory, kernels, threads, and models; or what a model holds.

    For example:

      kvist info
      kvist info --json
      kvist info model.gguf
      kvist info deepseek-v3/
    """
    if model is not None:
        print("\n".join(_model(model, as_json)))
        return
    found = {"machine": _machine(), "kernels": _kernels(), "models": _models()}
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(found)))


def _model(model: str, as_json: bool) -> list[str]:
    from kvist.spec.source import ALIASES

    path = Path(model).expanduser()
    if model not in ALIASES and (path.is_dir() or path.suffix == ".json") and not list(path.glob("*.gguf")):
        from kvist.cli.folder import folder, folder_lines

        held, show = folder(model), folder_lines
    else:
        from kvist.cli.contents import contents, lines

        held, show = contents(model), lines
    return [json.dumps(held, ensure_ascii=False, indent=2)] if as_json else show(held)


def _machine() -> dict[str, Any]:
    from kvist.base.machine import available_memory, processors, total_memory

    facts = _processor()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "processors": processors(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "memory_bytes": total_memory(),
        "available_bytes": available_memory(),
        "python": platform.python_version(),
    }


def _processor() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _kernels() -> dict[str, Any]:
    import torch

    from kvist.base.errors import NoBackend
    from kvist.kernels.dispatch import choose
    from kvist.kernels.native import variants

    found: dict[str, Any] = {"torch": torch.__version__, "native_variants": variants()}
    try:
        choice = choose()
    except NoBackend as error:
        found |= {"chosen": None, "passed_over": {}, "threads": torch.get_num_threads(), "error": str(error)}
    else:
        threads = getattr(choice.backend, "threads", torch.get_num_threads())
        found |= {"chosen": choice.backend.name, "passed_over": dict(choice.refusals), "threads": threads}
    return found | {"libgomp": libgomp_copies()}


def libgomp_copies() -> list[str]:
    """Files of OpenMP runtimes that this process has loaded: two of them mean two pools of threads."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(None, 5)[5] for line in lines if "libgomp" in line.rsplit("/", 1)[-1]})


def _models() -> list[dict[str, Any]]:
    from kvist.spec.source import ALIASES, installed

    return [
        {"name": alias.name, "about": alias.about, "installed": installed(alias) is not None, "install": alias.install}
        for alias in ALIASES.values()
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    from kvist.cli.summary import size

    machine, kernels = found["machine"], found["kernels"]
    memory = "unknown" if machine["memory_bytes"] is None else size(machine["memory_bytes"])
    free = "" if machine["available_bytes"] is None else f", {size(machine['available_bytes'])} available"
    lines = [
        f"machine   {machine['processor']}, {machine['processors']} processors ({machine['architecture']})",
        f"          {' '.join(machine['instructions']) or 'no vector instructions known to kvist'}",
        f"          memory {memory}{free}",
        f"kernels   {kernels['chosen'] or kernels['error']}, {kernels['threads']} threads",
        *(f"          not {name}: {reason}" for name, reason in kernels["passed_over"].items()),
        f"          Python {machine['python']}, torch {kernels['torch']}",
    ]
    copies = kernels["libgomp"]
    lines.append(f"          OpenMP runtime: {', '.join(copies) or 'none loaded'}")
    if len(copies) > 1:
        lines.append(
            f"warning   {len(copies)} copies of libgomp are loaded, each with its own threads on the same processors. "
            "Build kvist from source against the one that torch brings"
        )
    width = max(len(model["name"]) for model in found["models"])
    for first, model in zip(("models", *[""] * len(found["models"])), found["models"], strict=False):
        state = "installed" if model["installed"] else f"not installed: {model['install']}"
        lines.append(f"{first:10}{model['name']:{width}}  {model['about']}  ({state})")
    return [*lines, "          or a .gguf file, a folder with config.json and safetensors, a hub id, ollama:NAME"]
