"""The real command on the real small model. Each start of a process costs seconds: few tests, much in each."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from kvist.cli.main import run
from kvist.spec.source import resolve

PLAIN = ["run", "smollm2", "--no-chat-template", "--ctx-size", "128"]
KVIST = [sys.executable, "-m", "kvist.cli"]
PATIENCE_S = 120


def test_a_run_its_object_and_the_same_without_a_cache(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAIN, "-n", "8", "The capital of France is"]
    assert run(arguments) == 0
    out, err = capfd.readouterr()
    assert out.startswith(" Paris") and out.endswith("\n")
    for words in ("prompt       5 tokens", "generated    8 tokens", "bfloat16" if "bfloat16" in err else "float32"):
        assert words in err
    assert "30 layers x 3 kv heads x 64" in err
    found = {}
    for name, extra in (("kept", []), ("recomputed", ["--no-cache"])):
        assert run([*arguments, "--json", *extra]) == 0
        text, err = capfd.readouterr()
        assert err == ""
        found[name] = json.loads(text)
        assert found[name]["text"] == out.removesuffix("\n")
    assert found["kept"]["projections"] == {"with_cache": 12, "without_cache": sum(range(5, 13))}
    assert found["recomputed"]["projections"] == {"with_cache": 68, "without_cache": 68}
    assert found["kept"]["cache"]["bytes"] % found["kept"]["cache"]["bytes_per_token"] == 0
    assert set(found["kept"]) == {
        *("text", "prompt_tokens", "generated_tokens", "prefill_tok_s", "decode_tok_s", "ttft_s"),
        *("cache", "projections"),
    }


def test_a_chat_answer_stops_before_a_stop_string(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "smollm2", "--ctx-size", "256", "-n", "24", "--json", "Write one sentence about the sea."]
    assert run(arguments) == 0
    whole = json.loads(capfd.readouterr().out)["text"]
    assert "sea" in whole
    stop = whole[9:16]  # across token borders
    assert run([*arguments, "--stop", stop, "--stop", "never there"]) == 0
    assert json.loads(capfd.readouterr().out)["text"] == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.gguf", "x"], "no such model: 'absent.gguf'"),
        (["smollm2", ""], "the prompt is empty"),
        (["smollm2", "x", "--temperature", "-1"], "temperature is -1.0, allowed is 0"),
        (["smollm2", "x", "--top-k", "4"], "top_k is 4 while temperature is 0"),
        (["smollm2", "x", "--temperature", "1", "--top-p", "1.5"], "top_p is 1.5"),
        (["smollm2", "x", "--temperature", "1", "--min-p", "nan"], "min_p is nan"),
        (["smollm2", "x", "--seed", "-1"], "seed is -1"),
        (["smollm2", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["smollm2", "x", "--stop", ""], "stop holds an empty string"),
        (
            ["smollm2", "x", "--dtype", "float99"],
            "--dtype: unknown element type 'float99': use one of float32, bfloat16",
        ),
        (["smollm2", "x", "--kv-cache-dtype", "int3"], "--kv-cache-dtype: unknown element type 'int3'"),
        (["smollm2", "x", "--ctx-size", "0"], "--ctx-size is 0"),
        (["smollm2", "x", "--ctx-size", "9999999"], "9999999.*8192"),
        (["smollm2", "x", "--threads", "-2"], "--threads is -2"),
        (["smollm2", "x", "--block-size", "17"], "block size 17 is not a multiple of 16"),
        (["smollm2", "x", "--no-chat-template", "--system", "y"], "--system needs the chat template"),
        (["smollm2", "x", "--prompt-file", "y"], "were both given"),
        (["smollm2", "a\udcff"], "not UTF-8"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("kvist: ") and err.count("\n") == 1
    assert re.search(words, err), err


def test_a_prompt_that_does_not_fit_names_both_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "smollm2", "--no-chat-template", "--ctx-size", "16", "a b c d e f g h i j k l m n o p q r"]) == 2
    assert "the prompt has 18 tokens, the context holds 16" in capfd.readouterr().err


def test_a_cut_file_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = resolve("smollm2").path.read_bytes()[:3_000_000]
    for length in (10, 100_000, 3_000_000):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        assert run(["run", str(tmp_path / "cut.gguf"), "x"]) == 2
        err = capfd.readouterr().err
        assert "cut.gguf" in err and str(length) in err and err.count("\n") == 1


def test_a_base_model_continues_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "gemma3", "--ctx-size", "64", "-n", "3", "Once upon a time"]) == 0
    out, err = capfd.readouterr()
    assert out.strip() and err.count("has no chat template (a base model)") == 1
    assert "(window 512)" in err
    assert run(["run", "gemma3", "--ctx-size", "64", "--system", "Be brief.", "x"]) == 2
    assert "cannot take --system" in capfd.readouterr().err


def test_ctrl_c_ends_a_run_with_its_summary() -> None:
    with Popen([*KVIST, *PLAIN[:3], "-n", "4000", "Count: 1 2 3"], stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(8) == b" 4 5 6 7"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert b"interrupted" in err and b"projections" in err and b"Traceback" not in err
    assert out.endswith(b"\n")


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    with Popen([*KVIST, *PLAIN[:3], "-n", "4000", "Count: 1 2 3"], stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(4) == b" 4 5"
        process.stdout.close()
        assert process.wait(timeout=PATIENCE_S) == 1
        assert process.stderr.read() == b""


class Talk:
    """A terminal with ``arguments`` running on it."""

    def __init__(self, arguments: list[str]) -> None:
        self.master, slave = pty.openpty()
        self.process = Popen([*KVIST, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.seen = b""

    def until(self, words: bytes) -> bytes:
        """What came up to and with ``words``."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.master, 4096)
                except OSError as error:
                    raise AssertionError(self.seen) from error
        at = self.seen.index(words) + len(words)
        found, self.seen = self.seen[:at], self.seen[at:]
        return found

    def send(self, data: bytes) -> None:
        os.write(self.master, data)

    def end(self) -> int:
        code = self.process.wait(timeout=PATIENCE_S)
        os.close(self.master)
        return code


def test_a_chat() -> None:
    talk = Talk(["run", "smollm2", "--ctx-size", "512", "-n", "400"])
    talk.until(b"Ctrl-D ends")
    talk.until(b"> ")
    talk.send(b"Say hello.\n")
    assert len(talk.until(b"> ").split(b"\n")) > 2
    talk.send(b"word " * 600 + b"\n")
    talk.until(b"the context holds 512")  # told, and forgotten
    talk.until(b"> ")
    talk.send(b"Count from one to one hundred in words.\n")
    talk.until(b"words.\r\n")
    talk.until(b"e")  # the answer has begun
    talk.process.send_signal(signal.SIGINT)  # stops the answer, not the chat
    talk.until(b"> ")
    talk.send(b"\x04")
    summary = talk.until(b"without a cache")
    assert b", interrupted" in summary and b"Traceback" not in summary
    assert talk.end() == 0


def test_a_chat_with_a_base_model_is_refused() -> None:
    talk = Talk(["run", "gemma3"])
    talk.until(b"it is a base model, which continues text and does not answer")
    assert talk.end() == 2
