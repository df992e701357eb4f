"""Models with random weights, and the loss that all parts train them with."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.model_rows import ModelRows
from gpu.sizes import ModelShape


def random_model(shape: ModelShape, *, device: torch.device) -> Qwen2ForCausalLM:
    """Returns a model with float32 weights and no dropout.

    Their standard deviation is 0.02 at a width of 900, as in Qwen. It is larger in narrower models, so that attention
    changes log-probs by more than rounding does.
    """
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        tie_word_embeddings=True,
        initializer_range=0.6 / shape.width**0.5,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.set_attn_implementation("sdpa")
    return model


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters. `Module.to` would also cast the frequencies of rotations, which must stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def loss(
    model: Qwen2ForCausalLM, tokens_BS: torch.Tensor, *, packed_lengths_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns minus the mean log-prob of the next tokens. The chunked head computes it, as in the learner."""
    lengths = {} if packed_lengths_B is None else {"input_lengths": packed_lengths_B}
    rows = ModelRows.of(BatchedDataDict(input_ids=tokens_BS, **lengths), packed=packed_lengths_B is not None)
    logprobs_BT, *_ = model_logprobs(model, rows, temperature=1.0, with_entropy=False)
    return -logprobs_BT.mean()
