"""A prompt of 100,000 tokens through the command: progress is shown, memory stays flat, and Ctrl-C breaks nothing."""

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
from subprocess import PIPE, Popen, run

import pytest
import torch
import transformers as hf

import letters
from family_configs import WIDE, random_model

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc"),
]

LONG, SHORT, CTX = 100_000, 10_000, 100_040
PATIENCE_S = 300
# The peak of a process that does nothing but the command; getrusage would begin with the size of its parent.
CODE = """
import re, sys
from pathlib import Path
from kvist.cli.main import run
code = run(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long")
    random_model(hf.Qwen3Config(**{**WIDE, "max_position_embeddings": 131_072}, rope_theta=1e6)).save_pretrained(root)
    letters.save(root)
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 26, (LONG,), generator=draw).tolist()
    text = "".join(chr(ord("a") + i) for i in ids)  # one token a letter
    (root / "long.txt").write_text(text)
    (root / "short.txt").write_text(text[:SHORT])
    return root


def arguments(folder: Path, prompt: str, *more: str) -> list[str]:
    bounds = ["--kv-window", "256", "--kv-sinks", "4", "--ctx-size", str(CTX)]
    return ["run", str(folder), "--no-chat-template", "--prompt-file", str(folder / prompt), "-n", "8", *bounds, *more]


def test_memory_is_flat(folder: Path) -> None:
    peaks = {}
    for prompt, count in (("short.txt", SHORT), ("long.txt", LONG)):
        done = run(
            [sys.executable, "-c", CODE, *arguments(folder, prompt, "--json")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["prompt_tokens"] == count and found["generated_tokens"] == 8
        assert (found["cache"]["tokens_seen"], found["cache"]["rows_kept"]) == (count + 7, 260)
        peaks[count] = int(done.stderr.split()[-1]) << 10
    # The text, its pieces in the tokenizer and its ids: some hundred bytes for each token more, and no keys and values.
    assert peaks[LONG] - peaks[SHORT] < 400 * (LONG - SHORT), peaks


class Terminal:
    """The command with its errors on a terminal, where progress is shown."""

    def __init__(self, command: list[str]) -> None:
        self.master, slave = pty.openpty()
        self.process = Popen([sys.executable, "-m", "kvist", *command], stdout=PIPE, stderr=slave, stdin=slave)
        os.close(slave)
        self.seen = b""

    def until(self, words: bytes) -> None:
        end = time.monotonic() + PATIENCE_S
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.master, 4096)
                except OSError as error:  # the other side is closed
                    raise AssertionError(self.seen) from error

    def end(self) -> tuple[int, bytes]:
        assert self.process.stdout is not None
        self.until(b"through the layers")
        with self.process.stdout as stdout:
            out = stdout.read()
        code = self.process.wait(timeout=PATIENCE_S)
        os.close(self.master)
        return code, out


def test_progress_is_shown_and_gone_afterwards(folder: Path) -> None:
    terminal = Terminal(arguments(folder, "long.txt"))
    code, out = terminal.end()
    assert code == 0 and len(out) > 1
    shown = [int(n) for n in re.findall(rb"reading the prompt.*?(\d+)%", terminal.seen)]
    assert shown and shown == sorted(shown) and shown[-1] > shown[0]
    assert b"100,007 tokens seen, 260 rows kept" in terminal.seen


def test_ctrl_c_while_the_prompt_is_read(folder: Path) -> None:
    terminal = Terminal(arguments(folder, "long.txt"))
    terminal.until(b"reading the prompt")
    terminal.process.send_signal(signal.SIGINT)
    code, out = terminal.end()
    assert code == 130 and out == b"\n"
    assert b"interrupted" in terminal.seen and b"Traceback" not in terminal.seen
    # What was not read was not seen.
    seen, through, unread = (
        int(re.search(words, terminal.seen)[1].replace(b",", b""))  # type: ignore[index]
        for words in (rb"window +([\d,]+) tokens seen", rb"projections +([\d,]+) tokens", rb"\(([\d,]+) of them not")
    )
    assert 0 < seen == through < LONG and seen + unread == LONG
    # Nothing of it is left behind: the next run answers as ever.
    again = run(
        [sys.executable, "-m", "kvist", *arguments(folder, "short.txt", "--json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0 and json.loads(again.stdout)["prompt_tokens"] == SHORT
