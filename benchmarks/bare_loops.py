"""The two bare loops that a run is compared with: a vLLM engine that only generates, and a model that only trains.

Each runs in a process of its own, on the core where the process was started, and prints one JSON object. Both use the
configuration of the run: the same model, prompts, sampling parameters and batch. The learner's rows are padded,
`learner.micro_batch_size` at a time.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config

MEASURED_STEPS = 5
"""Smallest number of steps that a bare learner is measured for."""


def bare_generator(config: Config, *, seconds: float) -> dict[str, Any]:
    """Generates groups with a plain `AsyncLLM` for `seconds` seconds, after a warm-up of a quarter of that time.

    Returns the completion tokens and samples per second, the CPU time per token in µs of the engine and of this
    process, and the lengths (prompt, completion) of all samples.
    """
    from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
    from asyncrl.environments.interfaces import build_tasks
    from asyncrl.generation.vllm_engine import prepare_environment

    prepare_environment(config)
    tokenizer = load_tokenizer(config.model.path)
    tasks, _ = build_tasks(config)
    prompts = [encode_prompt(tokenizer, task.prompt) for task in tasks[:2000]]
    random.Random(0).shuffle(prompts)
    return asyncio.run(_generate(config, prompts, seconds=seconds))


async def _generate(config: Config, prompts: list[list[int]], *, seconds: float) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from asyncrl.generation.vllm_engine import VLLMEngine

    engine = await VLLMEngine.start(config, model_path=config.model.path)
    llm, generator, group_size = engine._llm, config.generator, config.learner.group_size
    lengths: list[tuple[int, int]] = []
    begun = 0

    async def slot() -> None:
        nonlocal begun
        while True:
            number, begun = begun, begun + 1
            prompt = prompts[number % len(prompts)]
            room = config.model.max_length - len(prompt)
            parameters = SamplingParams(
                n=group_size, seed=number * group_size if config.seeds_samples else None,
                temperature=generator.temperature, max_tokens=min(generator.max_completion_tokens, room),
                logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            async for output in llm.generate(tokens_input(prompt), parameters, f"bare-{number}"):
                lengths.extend((len(prompt), len(each.token_ids)) for each in output.outputs)

    slots = [asyncio.create_task(slot()) for _ in range(generator.max_concurrent_groups)]
    await asyncio.sleep(seconds / 4)
    me = psutil.Process()
    processes = {"engine": me.children(recursive=True), "front end": [me]}
    before, first, begin_s = _cpu_s(processes), len(lengths), time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed_s = time.perf_counter() - begin_s
    measured, after = lengths[first:], _cpu_s(processes)
    for task in slots:
        task.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    await engine.shutdown()
    tokens = sum(completion for _, completion in measured)
    return {
        "tokens_per_s": tokens / elapsed_s,
        "samples_per_s": len(measured) / elapsed_s,
        "us_per_token": {name: (after[name] - before[name]) / tokens * 1e6 for name in processes},
        "lengths": measured,
    }


def _cpu_s(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    times = {name: [each.cpu_times() for each in found] for name, found in processes.items()}
    return {name: sum(each.user + each.system for each in found) for name, found in times.items()}


def bare_learner(config: Config, lengths: list[list[int]], *, seconds: float) -> dict[str, Any]:
    """Trains steps of random tokens with the given lengths (prompt, completion) for `seconds` seconds, after two steps.

    The loop is what a short script would do: micro-batches in the caller's order, padded to their longest row, full
    logits, a policy gradient of the completions' log-probs, gradient clipping and AdamW. Returns the completion tokens
    and samples per second, and the CPU time per token in µs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    learner = config.learner
    torch.set_num_threads(learner.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=learner.optimizer.weight_decay)
    rows, draw = learner.groups_per_step * learner.group_size, random.Random(0)
    done_tokens = done_samples = steps = 0
    begin_s, cpu_s = 0.0, 0.0
    while steps < 2 + MEASURED_STEPS or time.perf_counter() - begin_s < seconds:
        if steps == 2:
            begin_s, cpu_s = time.perf_counter(), time.process_time()
        batch = draw.choices(lengths, k=rows)
        trained = sum(completion for _, completion in batch)
        for start in range(0, rows, learner.micro_batch_size):
            part = batch[start : start + learner.micro_batch_size]
            width = max(sum(row) for row in part)
            ids = torch.randint(2, model.config.vocab_size, (len(part), width))
            positions = torch.arange(width)
            first, end = (torch.tensor(column).unsqueeze(1) for column in ([p for p, _ in part], [*map(sum, part)]))
            mask = ((positions >= first) & (positions < end))[:, 1:].float()
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
            advantages = torch.randn(len(part), 1)
            loss = -(advantages * torch.exp(logprobs - logprobs.detach()) * mask).sum() / trained
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), learner.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps > 2:
            done_tokens, done_samples = done_tokens + trained, done_samples + rows
    elapsed_s = time.perf_counter() - begin_s
    return {
        "tokens_per_s": done_tokens / elapsed_s,
        "samples_per_s": done_samples / elapsed_s,
        "us_per_token": {"learner": (time.process_time() - cpu_s) / done_tokens * 1e6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=["generator", "learner"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--lengths", type=Path, help="file with the lengths that the generator printed")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config([arguments.config], arguments.overrides)
    if arguments.loop == "generator":
        found = bare_generator(config, seconds=arguments.seconds)
    else:
        found = bare_learner(config, json.loads(arguments.lengths.read_bytes()), seconds=arguments.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
