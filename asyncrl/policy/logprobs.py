"""Log-probs and entropies of next tokens, from a pass of a model that never makes its logits.

Legend: B rows, S tokens, T = S − 1 next tokens, D hidden width, K tokens of a support.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.policy.chunked_head import chunked_logprobs
from asyncrl.policy.support_head import support_logprobs
from asyncrl.ranks.branches import Branches
from asyncrl.ranks.packed import PackedRows

_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def model_logprobs(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    packed_lengths_B: torch.Tensor | None = None,
    support_BSK: torch.Tensor | None = None,
    branch_ids_BS: torch.Tensor | None = None,
    chunk_logits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns log-probs [B, T] of the next tokens and, if `with_entropy`, the entropies [B, T] of their distributions,
    as float32.

    Both are of softmax(logits / temperature), and both are differentiable. The model's own forward runs, including the
    hooks of FSDP. For this one call, its head returns these numbers instead of logits. No attention mask is needed:
    padding is on the right, where causal attention does not look. With `packed_lengths_B`, the model sees no padding at
    all, and results beyond a row's length are 0; its attention must be the one of `asyncrl.ranks.packed`. With
    `support_BSK`, the softmax of each token is over its support only, and both results are 0 for tokens without a
    support (`asyncrl.policy.support_head`). With `branch_ids_BS`, each branch of a row is a sequence of its own
    (`asyncrl.ranks.branches`), and both results are 0 for its first token. Raises ConfigError for a model whose logits
    are not a plain product with the head.
    """
    score = partial(_logprobs, model, temperature=temperature, with_entropy=with_entropy, chunk_logits=chunk_logits)
    if branch_ids_BS is None:
        return score(input_ids_BS, packed_lengths_B=packed_lengths_B, support_BSK=support_BSK)
    split = Branches.of(input_ids_BS, branch_ids_BS=branch_ids_BS, support_BSK=support_BSK)
    lengths_R = None if packed_lengths_B is None else split.lengths_R
    logprobs_RT, entropy_RT = score(split.input_ids_RL, packed_lengths_B=lengths_R, support_BSK=split.support_RLK)
    return split.at_next_tokens(logprobs_RT), None if entropy_RT is None else split.at_next_tokens(entropy_RT)


def _logprobs(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    packed_lengths_B: torch.Tensor | None,
    support_BSK: torch.Tensor | None,
    chunk_logits: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the log-probs and entropies of rows without branches."""
    head = _plain_head(model)
    packed = None
    support_NK = None if support_BSK is None else support_BSK[:, 1:].flatten(0, 1)
    if packed_lengths_B is not None:
        packed = PackedRows.of(input_ids_BS, lengths_B=packed_lengths_B, support_BSC=support_BSK)
        support_NK = packed.support_NC
    model_inputs = {"input_ids": input_ids_BS} if packed is None else packed.model_inputs()
    tokens: torch.Tensor = model_inputs["input_ids"]
    targets = tokens[:, 1:] if packed is None else tokens
    made: list[torch.Tensor] = []

    def forward(hidden_BSD: torch.Tensor) -> torch.Tensor:
        _check_positions(hidden_BSD, tokens, model=model)
        before = hidden_BSD[:, :-1] if packed is None else hidden_BSD[:, packed.before_N]
        score = chunked_logprobs if support_NK is None else partial(support_logprobs, support_NK=support_NK)
        columns = score(
            before.flatten(0, 1),
            head.weight,
            targets_N=targets.flatten(),
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_logits=chunk_logits,
        )
        stacked = torch.stack([column for column in columns if column is not None], dim=-1)
        made.append(stacked.view(*targets.shape, stacked.shape[-1]))
        return made[-1]

    with _forward_replaced(head, forward):
        returned = model(**model_inputs, use_cache=False).logits
    if len(made) != 1 or returned is not made[0]:
        raise ConfigError(
            f"model.path: {type(model).__name__} changes its logits after the output head, so log-probs that are "
            f"computed from the head would be wrong; choose a model that does not do this",
            key="model.path",
        )
    if packed is not None:
        returned = packed.at_next_tokens(returned)
    logprobs_BT, *entropy_BT = returned.unbind(-1)
    return logprobs_BT, entropy_BT[0] if entropy_BT else None


def _check_positions(hidden_BSD: torch.Tensor, tokens_BS: torch.Tensor, *, model: PreTrainedModel) -> None:
    if hidden_BSD.shape[:2] != tokens_BS.shape:
        raise ConfigError(
            f"model.path: the output head of {type(model).__name__} gets hidden states of shape "
            f"{tuple(hidden_BSD.shape)} for tokens of shape {tuple(tokens_BS.shape)}; choose a model whose head reads "
            "every position",
            key="model.path",
        )


def _plain_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Returns the model's output head. Raises ConfigError if logits are not just its product with the hidden states."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        found = "with a bias" if isinstance(head, torch.nn.Linear) else f"of type {type(head).__name__}"
        raise ConfigError(
            f"model.path: {type(model).__name__} has an output head {found}, but log-probs can only be computed "
            "for a torch.nn.Linear without bias; choose another model",
            key="model.path",
        )
    config = model.config.get_text_config()
    for key in _LOGIT_KEYS:
        value = getattr(config, key, None)
        if value is not None and value != 1.0:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {key} = {value} in its config, which changes logits after the "
                f"output head, so log-probs that are computed from the head would be wrong; choose a model without it",
                key="model.path",
            )
    return head


@contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replaces the module's forward for a while. Its hooks still run, and its class is unchanged. A forward that
    another library has set on the module is restored afterwards."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
