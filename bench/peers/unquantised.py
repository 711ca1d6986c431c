"""The same GGUF file with its matrices as bfloat16 or float16: what engines compute with when nothing is quantised.

python bench/peers/unquantised.py MODEL OUT.gguf [--type bfloat16|float16]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from kvist.spec.source import resolve

TYPES = {
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
}


def convert(source: Path, target: Path, kind: str) -> None:
    """Write ``target``: every field of ``source``, vectors as they are, matrices rounded once to ``kind``."""
    element, file_type = TYPES[kind]
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(file_type)
            continue
        main = field.types[0]
        sub = field.types[-1] if main == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), main, sub_type=sub)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = [int(n) for n in reversed(tensor.shape)]
        values = values.reshape(shape)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, values)
        elif element == GGMLQuantizationType.F16:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, quantize(values, element), raw_dtype=element)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an alias or a .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="bfloat16")
    options = parser.parse_args()
    convert(resolve(options.model).path, options.out, options.type)
