"""Recognises the errors of a rank that has too little memory, and has the advice for them (F26 in docs/faults.md).

The errors have many classes: `torch.OutOfMemoryError` and `torch.AcceleratorError` for a GPU, `MemoryError` of Python,
and a plain `RuntimeError` of torch's CPU allocator and of cuBLAS. They are recognised by the names of the classes and
by their texts.
"""

import re

LESS_MEMORY = (
    "lower learner.micro_batch_size, or learner.micro_batch_tokens with packed or dynamic batches; set "
    "learner.activation_checkpointing; or use more learner.ranks"
)
"""The advice for a rank that has too little memory."""

# cuBLAS and cuDNN report a GPU whose memory is full as `CUBLAS_STATUS_ALLOC_FAILED`, without the words "out of memory".
_OUT_OF_MEMORY = re.compile(
    "out ?of ?memory|MemoryError|can't allocate memory|not enough memory|_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a RuntimeError, as those of torch, or a MemoryError says that there was no memory, of a GPU or of
    the host.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(ValueError("the tool ran out of memory"))
    False
    """
    kinds = isinstance(error, RuntimeError | MemoryError)
    return kinds and _OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}") is not None
