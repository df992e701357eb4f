"""The first module of each process of an engine. It imports the engine before vLLM does, without garbage collection."""

import gc

from asyncrl.common.imports import uncollected

with uncollected():
    import vllm.v1.engine.core  # noqa: F401

    gc.freeze()
