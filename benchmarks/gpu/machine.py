"""The machine and the libraries of a measurement."""

import platform
from collections.abc import Iterator

import torch
import transformers

from gpu.rows import GIB, Row
from gpu.sizes import Size


def machine(size: Size) -> Iterator[Row]:
    """Names the device. Raises RuntimeError if the size needs a GPU and torch finds none."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    if size.device == "cpu":
        yield Row("device", "the CPU")
    elif not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; use --size cpu-check on a machine without a GPU")
    else:
        found = torch.cuda.get_device_properties(0)
        yield Row("device", f"{found.name}, {found.total_memory / GIB:.0f} GiB")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        versions += f", CUDA {torch.version.cuda}, NCCL {nccl}"
    yield Row("libraries", versions)
