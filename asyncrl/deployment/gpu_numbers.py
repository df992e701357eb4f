"""The numbers of a first configuration that depend on the memory of the GPUs: `asyncrl init` writes them."""

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.starter import GpuNumbers
from asyncrl.deployment.gpu_room import GIB, gpu_share
from asyncrl.deployment.memory_plan import Hardware, plan
from asyncrl.weights.manifest import ParameterSpec

ROOM = 0.9
"""Share of a GPU's memory that may be planned. The rest is for fragments, and for activations beyond the estimate."""
LIBRARIES_BYTES = 1.5 * GIB
"""Memory of a GPU for CUDA's context, NCCL and a chunk of the output head's logits (0.75 GiB, docs/gpu.md)."""
TOKENS_PER_PASS = (32768, 16384, 8192, 4096)
RANK_GPU = "GPU of a rank of the learner"
_ANY_MACHINE = Hardware(node_bytes=1e15, gpu_bytes=1e15, gpus_per_node=8, copy_speed=1e10, gpu_copy_speed=1e10)


def gpu_numbers(
    config: Config, parameters: Sequence[ParameterSpec], *, gpus: int, gpu_gib: float, reference: bool
) -> GpuNumbers:
    """Returns the first numbers whose plan fits, or the last ones that were tried. `config` says how both pools share
    the GPUs, and how long a sequence may be: a pass has room for one. The learner gets at most half of several GPUs."""
    found = None
    for choice in _choices(gpus, longest=config.model.max_length):
        learner = config.learner.model_copy(update={"batching": "packed", **choice})
        tried = config.model_copy(update={"learner": learner})
        sums = plan(tried, parameters, _ANY_MACHINE, reference=reference).sums
        [of_rank] = [line for line in sums if line.place == RANK_GPU]
        room = ROOM * gpu_gib * GIB * gpu_share(tried, RANK_GPU) - LIBRARIES_BYTES
        found = GpuNumbers(**choice, learner_gib=of_rank.nbytes / GIB, fits=of_rank.nbytes <= room)
        if found.fits:
            break
    assert found is not None, "there is always a choice"
    return found


def _choices(gpus: int, *, longest: int) -> Iterator[dict[str, Any]]:
    """Yields what may be chosen, the fastest first: fewer ranks leave more GPUs to the engines, and without
    checkpointing nothing is computed twice."""
    ranks = 1
    while ranks <= max(1, gpus // 2):
        for gradient_sync in ("update", "micro_batch") if ranks > 1 else ("update",):
            for checkpointing in (False, True):
                for tokens in TOKENS_PER_PASS:
                    yield {
                        "ranks": ranks,
                        "gradient_sync": gradient_sync,
                        "activation_checkpointing": checkpointing,
                        "micro_batch_tokens": max(tokens, longest),
                    }
        ranks *= 2
