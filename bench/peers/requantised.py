"""One model in every quantised type that stays packed, by llama.cpp's own quantiser.

Run by an interpreter that has llama-cpp-python, on a file whose matrices are not quantised (see unquantised.py):

python bench/peers/requantised.py IN.gguf FOLDER [TYPE ...]

Rows that are no multiple of 256 cannot be of a K type; llama.cpp gives those matrices another one.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K")


def write(source: Path, folder: Path, kind: str) -> Path:
    """``source`` with its matrices as ``kind``."""
    target = folder / f"{kind}.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.pure = False
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if failed:
        raise SystemExit(f"{kind}: llama.cpp's quantiser ended with {failed}")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*", default=list(TYPES))
    options = parser.parse_args()
    for kind in options.types:
        print(write(options.source, options.folder, kind))
