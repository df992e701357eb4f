"""Engine arguments of vLLM are passed on, except those that asyncrl sets or that would break a guarantee."""

import pytest

from asyncrl.config.engine_args import REFUSED, engine_arg_names, tool_parser_names
from asyncrl.config.load import is_own, load_config
from asyncrl.config.rules import check_config
from asyncrl.errors import ConfigError

needs_vllm = pytest.mark.skipif(not engine_arg_names(), reason="vLLM is not installed")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config([], overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("dtype: half", "generator.engine_args.dtype: asyncrl sets it; remove it and set model.dtype"),
        ("max_num_seqs: 8", "set generator.max_concurrent_groups"),
        ("logprobs_mode: raw_logits", "must be those of the distribution that was sampled"),
        ("quantization: fp8", "a quantized engine could not load; remove it"),
        ("speculative_config: {method: ngram}", "the draft model would keep its first weights"),
        ("enable_prefix_caching: false", "a weight update uses the prefix cache"),
        ("distributed_executor_backend: ray", "asyncrl places an engine's processes on one node"),
        ("worker_cls: mine.Worker", "so that it can load the policy's weights"),
        ("kv_transfer_config: {kv_connector: x}", "would come back after a weight update"),
        ("max_loras: 2", "adapters are set in the section model.lora"),
        ("enable_chunked_prefill: true", "is refused on CPUs, because vLLM's CPU worker ends"),
    ],
)
def test_an_argument_that_would_break_a_guarantee_is_refused_with_the_reason(argument: str, message: str) -> None:
    assert message in refusal(f"generator.engine_args={{{argument}}}")


def test_each_refused_argument_has_its_own_line() -> None:
    assert len(refusal("generator.engine_args={seed: 1, trust_remote_code: true}").splitlines()) == 2


@needs_vllm
def test_other_arguments_of_vllm_pass() -> None:
    check_config(load_config([], ["generator.engine_args={max_num_batched_tokens: 8192, async_scheduling: false}"]))
    check_config(load_config([], ["generator.engine_args={enable_chunked_prefill: true}", "generator.gpus=1"]))


@needs_vllm
def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant() -> None:
    message = refusal("generator.engine_args={max_num_batched_token: 8192}")
    assert message.endswith("vLLM has no engine argument of this name; did you mean 'max_num_batched_tokens'?")
    assert refusal("generator.engine_args={qqq: 1}").endswith("of this name; remove it")


@needs_vllm
def test_every_refused_argument_exists() -> None:
    assert set(REFUSED) <= engine_arg_names()


@needs_vllm
def test_names_are_read_from_both_classes_and_none_is_private() -> None:
    assert {"model", "kv_cache_dtype", "enable_log_requests"} <= engine_arg_names()
    assert not [name for name in engine_arg_names() if name.startswith("_")]


@needs_vllm
@pytest.mark.parametrize(
    ("name", "nearest"),
    [("herms", "hermes"), ("llama3", "llama3_json"), ("Mistral", "mistral"), ("qwen3-coder", "qwen3_coder"), ("x", "")],
)
def test_an_unknown_tool_parser_is_refused_with_all_names_the_closest_first(name: str, nearest: str) -> None:
    said = refusal(f"generator.tool_parser={name}")
    assert f"generator.tool_parser = {name}: vLLM has no such tool parser; set one of {nearest}" in said
    assert all(known in said for known in tool_parser_names())


@needs_vllm
def test_the_names_of_tool_parsers_are_those_that_vllm_registers() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert tool_parser_names() == set(ToolParserManager.list_registered())
    for name in ("hermes", "mistral", "pythonic"):
        check_config(load_config([], [f"generator.tool_parser={name}"]))


def test_without_vllm_on_this_machine_no_tool_parser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.engine_args.tool_parser_names", frozenset)
    check_config(load_config([], ["generator.tool_parser=mine"]))


def test_without_vllm_on_this_machine_only_known_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.config.engine_args.engine_arg_names", frozenset)
    check_config(load_config([], ["generator.engine_args={qqq: 1}"]))
    assert "model.path" in refusal("generator.engine_args={model: x}")


def test_each_deployment_may_have_its_own_arguments() -> None:
    assert is_own("generator.engine_args.max_num_batched_tokens")
