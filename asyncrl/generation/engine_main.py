"""The first module of each process of an engine. It imports the engine before vLLM does, without garbage collection."""

import gc

import setproctitle

from asyncrl.common.imports import uncollected, without_compiler

# vLLM names the process later. setproctitle finds the memory of the name only as long as the first variable of the
# environment is unchanged, and ray changes it if it is RAY_CLIENT_MODE. It remembers what it has found.
setproctitle.getproctitle()

with uncollected(), without_compiler():
    from asyncrl.vllm_internals import EngineCoreProc  # noqa: F401

    gc.freeze()
