"""The first module that each process of a vLLM engine imports (`children_begin_with`). It imports vLLM's engine without
garbage collection, before vLLM's own start would import it."""

import gc

import setproctitle

from asyncrl.common.imports import uncollected, without_compiler

# vLLM names the process later, with setproctitle. setproctitle finds the memory of the name only as long as the first
# variable of the environment is unchanged, and ray changes this variable if it is RAY_CLIENT_MODE. So it is called now:
# setproctitle remembers the memory that it has found.
setproctitle.getproctitle()

with uncollected(), without_compiler():
    from asyncrl.vllm_internals import EngineCoreProc  # noqa: F401

    gc.freeze()
