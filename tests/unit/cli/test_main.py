from __future__ import annotations

import json
import resource
import sys
from subprocess import run as start

import pytest

from kvist.base.errors import OutOfMemory
from kvist.cli import info as info_command
from kvist.cli.main import COMMANDS, run

HELP_SECONDS = 0.5  # of processor time: the clock also counts what else the machine does


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], []])
def test_help_answers_at_once(arguments: list[str]) -> None:
    code = (
        "import sys; from kvist.cli.main import run; code = run(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)), file=sys.stderr);"
        "sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = start([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Usage: kvist" in done.stdout and "For example:" in done.stdout
    assert done.stderr == "[]\n"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_SECONDS


def test_python_m_kvist_is_the_command() -> None:
    done = start(
        [sys.executable, "-m", "kvist", "run", "absent.gguf", "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("kvist: no such model: 'absent.gguf'")


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        assert f"Usage: kvist {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvist ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], "No such command 'frob'; kvist --help lists what there is"),
        (["run"], "Missing argument 'MODEL'; kvist run --help lists what there is"),
        (["run", "smollm2", "x", "--nonsense"], "No such option: --nonsense"),
        (["run", "smollm2", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvist: ") and err.count("\n") == 1
    assert words in err


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OutOfMemory("needs 9 GiB, 2 GiB are free")

    monkeypatch.setattr(info_command, "_machine", fail)
    assert run(["info"]) == 2
    assert capsys.readouterr() == ("", "kvist: needs 9 GiB, 2 GiB are free\n")


def test_an_error_of_nobodys_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(info_command, "_machine", fail)
    with pytest.raises(ZeroDivisionError):
        run(["info"])


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["processors"] >= 1
    assert found["kernels"]["threads"] >= 1 and found["kernels"]["chosen"]
    assert [model["name"] for model in found["models"]] == ["smollm2", "gemma3"]
    assert run(["info"]) == 0
    text = capsys.readouterr().out
    for words in ("machine", found["kernels"]["chosen"], "threads", "OpenMP runtime", "smollm2", "installed"):
        assert words in text
    for name, reason in found["kernels"]["passed_over"].items():
        assert f"not {name}: {reason}" in text


def test_info_warns_of_two_thread_pools_and_says_how_to_get_models() -> None:
    found = {
        "machine": info_command._machine(),
        "kernels": info_command._kernels() | {"libgomp": ["/a/libgomp.so.1", "/b/libgomp-123.so"]},
        "models": [{"name": "m", "about": "a model", "installed": False, "install": "pip install m"}],
    }
    text = "\n".join(info_command._lines(found))
    assert "warning   2 copies of libgomp are loaded" in text
    assert "m  a model  (not installed: pip install m)" in text


def test_kernels_that_are_not_there_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVIST_KERNELS", "quantum")
    assert run(["info"]) == 0
    assert "no kernels called 'quantum'" in capsys.readouterr().out
