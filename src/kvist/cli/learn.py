"""``kvist learn``: the theory of the KV cache, run live by the package itself."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.base.errors import UsageError

if TYPE_CHECKING:
    from kvist.learn.run import Finding
    from kvist.learn.topics import Script, Topic

WIDTH = 100


def command(
    topic: Annotated[str | None, typer.Argument(help="What to run; without it, the list of topics.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every topic.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Measure a real model (work, roofline, cost): smollm2, gemma3, a file or folder.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, max=4096, help="Width of a head, for two-layers.")] = None,
    device: Annotated[str | None, typer.Option(help="Whose bandwidth, for roofline: h100, this, ...")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write pictures (png) into this folder.")] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the script in place of running it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run the figures and exercises of the theory of KV caches, each as one short script that checks itself.

    Exit code 0 when every check passed, 1 when not, 2 for bad input.

    For example:

      kvist learn

      kvist learn work

      kvist learn work --model smollm2 --plot pictures

      kvist learn ring --source
    """
    from kvist.learn.topics import TOPICS, find_topic, script_of

    if everything and topic is not None:
        raise UsageError(f"--all runs every topic, {topic} is one of them: give one or the other")
    if topic is None and not everything:
        given = {"--model": model, "--head-dim": head_dim, "--device": device, "--plot": plot, "--source": source}
        for flag, value in given.items():
            if value:
                raise UsageError(f"{flag} needs a topic, or --all")
        _list(as_json)
        return 0
    chosen: list[tuple[Topic, Script, bool]] = []
    if topic is not None:
        one = find_topic(topic)
        chosen.append((one, script_of(one, model), model is not None))
    else:
        chosen += [(each, script_of(each, None), False) for each in TOPICS if each.script]
        chosen += [(each, script_of(each, model), True) for each in TOPICS if each.on_model and model is not None]
    options = {"head_dim": head_dim, "device": device}
    for name, value in options.items():
        takers = [each.name for each, _, on_model in chosen if each.parameter == name and not on_model]
        if value is not None and not takers:
            raise UsageError(
                f"--{name.replace('_', '-')} changes nothing here: {_owner(name)} takes it, without --model"
            )
    if source:
        if as_json or plot is not None:
            raise UsageError("--source prints a script and runs nothing: leave --json and --plot out")
        print("\n\n".join(script.source.rstrip() for _, script, _ in chosen))
        return 0
    if plot is not None:
        _check_pictures(plot, [script for _, script, _ in chosen])
    findings: list[Finding] = []
    for each, script, on_model in chosen:
        wanted = options.get(each.parameter or "")
        arguments = [model] if on_model and model is not None else [] if wanted is None else [str(wanted)]
        findings.append(_run(each.name, script, arguments, plot, quiet=as_json, first=not findings))
    if as_json:
        passed = all(finding.passed for finding in findings)
        print(json.dumps({"passed": passed, "topics": [finding.to_dict() for finding in findings]}, indent=1))
    elif everything and model is None:
        print("\nOn a real model: kvist learn --all --model smollm2")
    return 0 if all(finding.passed for finding in findings) else 1


def _run(name: str, script: Script, arguments: list[str], plot: Path | None, *, quiet: bool, first: bool) -> Finding:
    from kvist.learn.run import run_script

    talk = sys.stderr.isatty()
    if talk:
        print(f"\r\x1b[K{script.title} ...", end="", file=sys.stderr, flush=True)
    finding = run_script(name, script, arguments)
    if talk:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not quiet:
        print(("" if first else "\n") + render(finding), flush=True)
    if plot is not None and finding.result is not None:
        from kvist.learn.pictures import PICTURES, draw

        if script.name in PICTURES:
            path = plot / f"{script.name}.png"
            draw(script.name, finding.result, path)
            print(f"wrote {path}", file=sys.stderr)
    return finding


def render(finding: Finding) -> str:
    """Title, what was printed, what it means, and each check with its verdict."""
    lines = [f"{finding.script.title}", ""]
    lines += [f"  {line}".rstrip() for line in finding.output.splitlines()]
    lines += ["", *textwrap.wrap(finding.script.explanation, WIDTH, break_on_hyphens=False), ""]
    lines += [f"{'passed' if held else 'FAILED'}: {sentence}" for sentence, held in finding.checks.items()]
    return "\n".join(lines)


def _list(as_json: bool) -> None:
    from kvist.learn.pictures import PICTURES
    from kvist.learn.topics import TOPICS, read_script

    topics = []
    for topic in TOPICS:
        names = [name for name in (topic.script, topic.on_model) if name is not None]
        topics.append(
            {
                "topic": topic.name,
                "title": read_script(names[0]).title,
                "needs_model": topic.script is None,
                "takes_model": topic.on_model is not None,
                "picture": any(name in PICTURES for name in names),
                "scripts": [f"{name}.py" for name in names],
            }
        )
    if as_json:
        print(json.dumps({"topics": topics}, indent=1))
        return
    for entry in topics:
        model = "with --model" if entry["needs_model"] else "--model" if entry["takes_model"] else ""
        print(f"{entry['topic']:<12} {entry['title']:<84} {model}".rstrip())
    print("\nkvist learn TOPIC runs one and --all all of them; --source prints the script, --plot DIR draws pictures.")


def _owner(parameter: str) -> str:
    from kvist.learn.topics import TOPICS

    return next(topic.name for topic in TOPICS if topic.parameter == parameter)


def _check_pictures(folder: Path, scripts: list[Script]) -> None:
    """UsageError before anything runs when there is nothing to draw with, nothing to draw, or nowhere to put it."""
    from kvist.learn.pictures import PICTURES, require_matplotlib

    if not any(script.name in PICTURES for script in scripts):
        raise UsageError(f"{scripts[0].path.stem} has no picture: leave --plot out; there are {', '.join(PICTURES)}")
    require_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write pictures into {folder}: {error.strerror}") from error
