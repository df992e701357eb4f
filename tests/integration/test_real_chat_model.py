"""SmolLM2, a real chat model of 30 layers, in bfloat16 with the default limits: healthy weights pass the parity checks,
and wrong ones are found. `python benchmarks/make_smollm2.py models/SmolLM2-135M-Instruct` makes the model; without it
the test is skipped."""

from pathlib import Path

import parity_faults
import pytest
from local_ray import local_ray
from parity_faults import configured, exchanged, permuted, started
from ray import cloudpickle

from asyncrl.generation.vllm_engine import prepare_environment

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL.is_dir(), reason="benchmarks/make_smollm2.py has not made SmolLM2"),
]


@pytest.mark.asyncio
async def test_healthy_weights_pass_and_wrong_ones_are_found() -> None:
    cloudpickle.register_pickle_by_value(parity_faults)  # ranks cannot import it
    config = configured(str(MODEL))
    prepare_environment(config)
    with local_ray(cpus=1, object_store_mb=1000):
        async with started(config) as bench:
            bench.publish()
            weights = bench.published
            await bench.load(weights)
            for name in ("healthy", "healthy again"):
                healthy = await bench.judged(name)
                assert healthy.differing == 0
                assert max(healthy.probe, healthy.size, healthy.importance, healthy.first) < 1.0
            await bench.load(exchanged(weights, 4, 5))
            found = await bench.judged("layers exchanged")
            assert found.differing == 12, "six matrices and two norms of each layer, of which some are fused"
            assert min(found.probe, found.size, found.first) > 1.0
            await bench.load(permuted(weights, "layers.9.self_attn.k_proj.weight"))
            found = await bench.judged("a matrix permuted")
            assert found.differing == 1
            assert min(found.probe, found.size) > 1.0
            await bench.load(weights)
            found = await bench.judged("rare tokens too high", reported=lambda nats: nats + 3.0 * (nats < -5.0))
            assert found.importance > 1.0
