"""``kvist plan`` as a user meets it: text, JSON, exit codes, and how little it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from kvist.base.errors import KvistError, UsageError
from kvist.cli.plan import command

KEYS = (
    "growing_bytes_per_token sequence_bytes total_bytes allocated_bytes weights_bytes max_context max_sequences fits"
    " assumed layers"
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("plan")(command)

    def call(*arguments: str) -> tuple[int, str]:
        code = app(args=list(arguments), standalone_mode=False)
        return code, capsys.readouterr().out

    return call


def test_json_has_the_promised_keys(run: Callable[..., tuple[int, str]]) -> None:
    code, out = run("smollm2", "--json", "--memory", "4GiB", "--ctx-size", "2k", "--max-num-seqs", "3")
    plan: dict[str, Any] = json.loads(out)
    assert code == 0 and set(KEYS.split()) <= set(plan)
    assert plan["growing_bytes_per_token"] == 23040
    assert plan["layers"] == [
        {
            "kind": "full",
            "count": 30,
            "bytes_per_token": 23040,
            "bytes_per_token_per_layer": 768,
            "fixed_bytes": 0,
            "keeps_at_most": None,
            "keeps": ["K and V of 3 heads x 64"],
        }
    ]
    assert plan["total_bytes"] == 3 * plan["sequence_bytes"] == 3 * 2048 * 23040
    assert plan["fits"] is True and plan["max_sequences"] >= 3


def test_exit_codes(run: Callable[..., tuple[int, str]]) -> None:
    assert run("smollm2")[0] == 0
    assert run("smollm2", "--kv-cache-memory", "1GiB")[0] == 0
    code, out = run("smollm2", "--kv-cache-memory", "1MiB")
    assert code == 3 and "NO" in out


def test_the_equation_is_shown_with_its_numbers(run: Callable[..., tuple[int, str]]) -> None:
    _, out = run("gemma3", "--ctx-size", "max", "--explain", "--kv-cache-dtype", "bf16")
    assert "sliding window: 15 layers x 1 kv heads x (256 + 256) x 2 B x min(32768, 512) tokens = 7,864,320 B" in out
    assert "full attention: 3 layers x 1 kv heads x (256 + 256) x 2 B x 32768 tokens = 100,663,296 B" in out


def test_a_pasted_command(run: Callable[..., tuple[int, str]]) -> None:
    pasted = ["vllm", "serve", "org/m", "--max-model-len", "4096", "--port", "1", "--what", "2"]
    code, out = run("smollm2", "--", *pasted)
    assert code == 0 and "engine vllm" in out and "at 4,096 tokens" in out
    assert "used           --max-model-len 4096" in out
    assert "irrelevant     --port 1" in out and "not understood --what 2" in out


def test_lengths_and_log(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("100\n200\n")
    (tmp_path / "log").write_text("Available KV cache memory: 1.00 GiB\nGPU KV cache size: 46,592 tokens\n")
    _, out = run(
        *("smollm2", "--engine", "vllm", "--memory", "8GiB"),
        *("--lengths", str(tmp_path / "lengths"), "--calibrate", str(tmp_path / "log")),
    )
    assert "lengths of 2 requests: mean 150" in out
    assert "tokens in the cache: printed 46,592, planned 46,592, off by +0.00%" in out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture(run: Callable[..., tuple[int, str]], tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending}"
    run("gemma3", "--device", "h100", "--plot", str(path))
    assert path.stat().st_size > 5000
    with pytest.raises(UsageError, match="must end in one of"):
        run("gemma3", "--plot", str(tmp_path / "plan.gif"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model"),
        (("a", "b"), "neither one model nor a known command"),
        (("smollm2", "--memory", "5XB"), "--memory is '5XB'"),
        (("smollm2", "--ctx-size", "many"), "--ctx-size is 'many'"),
        (("smollm2", "--engine", "foo"), "unknown engine 'foo': use one of kvist, vllm, sglang"),
        (("smollm2", "--device", "potato"), "unknown device"),
        (("smollm2", "--kv-cache-dtype", "q9"), "no cache type 'q9'"),
        (("smollm2", "--block-size", "17"), "block size 17"),
        (("smollm2", "--calibrate", "absent"), "cannot read absent"),
    ],
)
def test_bad_input(run: Callable[..., tuple[int, str]], arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(KvistError, match=words):
        run(*arguments)


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from kvist.cli.plan import command; command(['gemma3'], as_json=True);"
        "heavy = ('torch', 'transformers', 'numpy', 'gguf', 'matplotlib');"
        "print(*[m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert json.loads(done.stdout)["growing_bytes_per_token"] == 3072


def test_the_room_can_be_called() -> None:
    import kvist.plan

    assert kvist.plan("smollm2", ctx_size="2k").sequence_bytes == 2048 * 23040  # type: ignore[operator]
