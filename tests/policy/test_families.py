"""A config.json alone tells which models may not be trained or served, before anything starts."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.policy.families import FAMILIES, check_family, family_problems, is_tied
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.model_directory import second_head
from asyncrl.policy.tq_policy import TQPolicy


def config(*, batching: str = "packed", max_length: int = 4096, gpus: float = 0.0) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "models/some", "max_length": max_length},
            "learner": {"batching": batching},
            "generator": {"gpus": gpus},
        }
    )


def found(model: dict[str, Any], **options: Any) -> tuple[list[str], list[str]]:
    return family_problems(model, config(**options))


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "phi3", "gpt2", "olmo2", "smollm3", "starcoder2"],
)
@pytest.mark.parametrize("batching", ["packed", "dynamic", "padded"])
def test_a_model_that_is_right_has_no_problem_and_no_warning(model_type: str, batching: str) -> None:
    model = {"model_type": model_type, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}
    assert found(model, batching=batching) == ([], [])


@pytest.mark.parametrize("model_type", ["stablelm", "nemotron", "falcon"])
def test_rows_that_do_not_stay_apart_are_refused_with_the_setting(model_type: str) -> None:
    [problem], _ = found({"model_type": model_type})
    assert problem == (
        f"model.path = models/some: models of the family {model_type} cannot be trained with learner.batching = "
        "packed: it has an attention of its own, which cannot keep packed rows apart; set learner.batching to dynamic"
    )
    assert found({"model_type": model_type}, batching="dynamic") == ([], [])


@pytest.mark.parametrize(
    ("model_type", "on_cpus", "on_gpus"),
    [
        ("qwen3_moe", 1, 0), ("olmoe", 1, 0), ("lfm2", 1, 0), ("kimi_linear", 1, 0), ("zamba2", 1, 0),
        ("glm4_moe", 1, 1), ("mixtral", 1, 1), ("gemma4_text", 1, 1), ("jamba", 1, 1), ("olmo_hybrid", 1, 1),
        ("qwen3", 0, 0), ("stablelm", 0, 0),
    ],
)  # fmt: skip
def test_what_engines_cannot_serve_is_refused_where_they_run(model_type: str, on_cpus: int, on_gpus: int) -> None:
    model = {"model_type": model_type}
    assert len(found(model, batching="dynamic", gpus=0.0)[0]) == on_cpus
    assert len(found(model, batching="dynamic", gpus=1.0)[0]) == on_gpus
    check_family(model, config(batching="dynamic"), path="anywhere")  # a loop without engines may train it


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
        {"model_type": "zebra", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}},
        {"model_type": "zebra", "text_config": {"model_type": "llama", "quantization_config": {"bits": 8}}},
        {"model_type": "mistral", "compression_config": {"format": "int-quantized"}},
        {"model_type": "zebra", "text_config": {"compression_config": {"format": "pack-quantized"}}},
    ],
)
def test_quantized_weights_are_refused(model: dict[str, Any]) -> None:
    [problem], _ = found(model)
    assert re.search("its weights are quantized [(](quantization|compression)_config in config.json", problem)
    assert "in bfloat16" in problem
    plain = {key: None if key.endswith("ion_config") else value for key, value in model.items()}
    assert found(plain | {"text_config": None})[0] == []


@pytest.mark.parametrize("inner", ["stablelm", "nemotron", "lfm2", "gpt_oss", "bloom", "falcon_h1"])
@pytest.mark.parametrize("outer", ["zebra_vl", "llava", None])
def test_a_wrapper_of_a_text_model_that_is_refused_is_refused_by_the_family_inside(
    inner: str, outer: str | None
) -> None:
    model = {"model_type": outer, "text_config": {"model_type": inner}}
    problems, _ = found(model, gpus=1.0)
    assert problems == found({"model_type": inner}, gpus=1.0)[0]
    assert len(problems) == 1


@pytest.mark.parametrize("inner", ["llama", "qwen3", "zebra"])
def test_a_wrapper_that_was_never_compared_is_a_warning_although_its_text_model_was(inner: str) -> None:
    problems, [warning] = found({"model_type": "zebra_vl", "text_config": {"model_type": inner}})
    assert problems == []
    assert "models of the family zebra_vl were never compared" in warning


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["llama", "qwen3", "gemma"])
def test_code_that_comes_with_a_wrapper_is_refused_although_its_text_model_is_known(inner: str) -> None:
    model = {"model_type": "zebra_vl", "auto_map": {"AutoModel": "a.B"}, "text_config": {"model_type": inner}}
    [problem] = found(model)[0]
    assert "transformers has no model_type 'zebra_vl'" in problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problems"), [("zebra", 1), ("chatglm_next", 1), (None, 1), ("qwen3", 0), ("persimmon", 0)]
)
def test_code_that_comes_with_a_model_is_refused_if_transformers_lacks_the_model(
    name: str | None, problems: int
) -> None:
    model = {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}} | ({} if name is None else {"model_type": name})
    assert len(found(model)[0]) == problems


@pytest.mark.parametrize(
    ("rope", "section"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {"max_position_embeddings": 2048}),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {"max_position_embeddings": 2048}),
        ({"rope_scaling": {"rope_type": "longrope"}}, {"original_max_position_embeddings": 2048}),
        ({"rope_scaling": {"type": "su"}, "max_position_embeddings": 9000}, {"original_max_position_embeddings": 2048}),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}, {}),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "chunks": {"rope_type": "default"}}},
            {"max_position_embeddings": 2048},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", [False, True], ids=["outer", "text_config"])
def test_positions_that_depend_on_the_longest_row_limit_max_length(
    rope: dict[str, Any], section: dict[str, Any], inside: bool
) -> None:
    model: dict[str, Any] = {"model_type": "llama", **({"text_config": rope | section} if inside else rope | section)}
    [problem], _ = found(model, max_length=2049)
    assert problem.endswith("lower model.max_length = 2049 to 2048")
    assert found(model, max_length=2048) == ([], [])


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "default"])
def test_other_positions_have_no_limit_here(kind: str) -> None:
    model = {"model_type": "llama", "rope_parameters": {"rope_type": kind}, "max_position_embeddings": 16}
    assert found(model) == ([], [])


@pytest.mark.parametrize("chunk", [1, 512, 4095])
def test_rows_beyond_a_chunk_are_refused(chunk: int) -> None:
    model = {"model_type": "llama4_text", "attention_chunk_size": chunk}
    problems, _ = found(model, gpus=1.0)
    assert all(problem.endswith(f"lower model.max_length = 4096 to {chunk}") for problem in problems)
    assert len(problems) == 2
    assert len(found(model, batching="dynamic", gpus=1.0)[0]) == 1, "engines"
    assert found(model, max_length=chunk, gpus=1.0) == ([], [])


@pytest.mark.parametrize("window", [1, 512, 4095])
def test_packed_rows_beyond_a_window_that_they_do_not_have_are_refused(window: int) -> None:
    model = {"model_type": "phimoe", "sliding_window": window}
    with pytest.raises(ConfigError, match=f"more than {window} tokens.* set learner.batching to dynamic"):
        check_family(model, config(), path="here")
    for right in (config(batching="dynamic"), config(max_length=window)):
        check_family(model, right, path="here")
    check_family({**model, "sliding_window": None}, config(), path="here")


@pytest.mark.parametrize(("full", "problems"), [(0, 0), (1, 1), (14, 1), (27, 1), (28, 0)])
def test_a_window_in_some_layers_only_is_refused_for_qwen2(full: int, problems: int) -> None:
    model = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": full, "num_hidden_layers": 28}
    assert len(found(model)[0]) == problems
    assert found({**model, "use_sliding_window": False}) == ([], [])


@pytest.mark.parametrize("model_type", ["gemma2", "vaultgemma", "nanochat", "gemma3n_text"])
def test_caps_are_refused_also_where_config_json_leaves_them_to_the_default(model_type: str) -> None:
    assert any("final_logit_softcapping" in problem for problem in found({"model_type": model_type})[0])
    none = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    check_family({"model_type": model_type, **none}, config(), path="here")
    with pytest.raises(ConfigError, match=r"= 7\.5"):
        check_family({"model_type": model_type, **none, "final_logit_softcapping": 7.5}, config(), path="here")


@pytest.mark.parametrize("model_type", ["zebra", "persimmon", "qwen9"])
def test_a_family_that_was_never_compared_is_a_warning(model_type: str) -> None:
    problems, [warning] = found({"model_type": model_type})
    assert problems == []
    assert f"models of the family {model_type} were never compared" in warning


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "moe_conv"])
def test_a_kind_of_layer_that_was_never_compared_is_a_warning(kind: str) -> None:
    problems, [warning] = found({"model_type": "qwen3", "layer_types": ["full_attention", kind]})
    assert problems == []
    assert f"with layers of the kind {kind} were never compared" in warning


@pytest.mark.parametrize("make", [Policy, lambda *args: TQPolicy(*args, dp_cfg={"impl": "transfer_queue"})])
@pytest.mark.parametrize("model_type", ["stablelm", "lfm2", "jamba", "bloom"])
def test_a_policy_of_a_loop_of_your_own_is_refused_when_it_is_made(make: Any, model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"{tmp_path}: models of the family {model_type} cannot be trained"):
        make(config(), str(tmp_path))


def test_the_documentation_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


def test_every_reason_is_a_clause() -> None:
    for family in FAMILIES.values():
        for reason in (family.learner, family.packed, family.engine, family.engine_on_cpus, family.packed_window):
            assert not reason.endswith((".", ";"))


# -- a second head ---------------------------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: dict[str, bytes]) -> None:
    header, begin = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


NUMBERS = bytes(range(256)) * 4


@pytest.mark.parametrize(
    ("head", "embeddings"),
    [
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "transformer.wte.weight"),
        ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "two files"])
@pytest.mark.parametrize("place", [0, 511, 1023, None])
def test_a_second_head_with_other_numbers_is_found(
    head: str, embeddings: str, split: bool, place: int | None, tmp_path: Path
) -> None:
    other = bytearray(NUMBERS)
    if place is not None:
        other[place] ^= 1
    tensors = {"model.norm.weight": b"\0" * 6, embeddings: NUMBERS, head: bytes(other)}
    if split:
        names = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
        for name, file in names.items():
            write_tensors(tmp_path / file, {name: tensors[name]})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        write_tensors(tmp_path / "model.safetensors", tensors)
    assert second_head(tmp_path) == (None if place is None else (head, embeddings))


@pytest.mark.parametrize(
    "data",
    [b"", b"\1\2", struct.pack("<Q", 9) + b"{", struct.pack("<Q", 2) + b"[]", b"\xff" * 64],
    ids=["empty", "two bytes", "half a header", "a list", "a size beyond all files"],
)
def test_files_that_cannot_be_read_are_left_to_the_loader(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert second_head(tmp_path) is None


def test_one_matrix_alone_is_no_second_head(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"model.embed_tokens.weight": NUMBERS})
    assert second_head(tmp_path) is None


@pytest.mark.parametrize(
    ("model", "tied"),
    [
        ({"model_type": "qwen3", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma", "tie_word_embeddings": False}, False),
        ({"model_type": "gemma"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "zebra"}, False),
        ({"model_type": "zebra", "text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_config_json_or_the_family_says_whether_the_head_is_tied(model: dict[str, Any], tied: bool) -> None:
    assert is_tied(model) == tied
