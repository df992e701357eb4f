"""Log-probs and entropies of next tokens, from a pass of a model that never makes its logits.

Legend: B rows, S tokens, T = S − 1 next tokens, D hidden width, K tokens of a support.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.policy.chunked_head import CHUNK_LOGITS, ChunkedHead
from asyncrl.policy.support_head import SupportHead
from asyncrl.ranks.model_rows import ModelRows

_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def model_logprobs(
    model: PreTrainedModel, rows: ModelRows, *, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns log-probs [B, T] of the next tokens and, if `with_entropy`, the entropies [B, T] of their distributions,
    as float32.

    Both are of softmax(logits / temperature), and both are differentiable. The model's own forward runs, including the
    hooks of FSDP. For this one call, its head returns these numbers instead of logits. If the rows are packed, results
    beyond a row's length are 0, and the model's attention must be the one of `asyncrl.ranks.packed`. If they have
    supports, the softmax of each token is over its support only, and both results are 0 for tokens without a support.
    For the first token of a branch, both results are 0. Raises ConfigError for a model whose logits are not a plain
    product with the head.
    """
    head = _plain_head(model)
    made: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        _check_positions(hidden, rows.inputs["input_ids"], model=model)
        columns = head_logprobs(
            rows.before_targets(hidden).flatten(0, 1),
            head.weight,
            targets_N=rows.targets.flatten(),
            support_NK=rows.support_NK,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        stacked = torch.stack([column for column in columns if column is not None], dim=-1)
        made.append(stacked.view(*rows.targets.shape, stacked.shape[-1]))
        return made[-1]

    with _forward_replaced(head, forward):
        returned = model(**rows.inputs, use_cache=False).logits
    if len(made) != 1 or returned is not made[0]:
        raise ConfigError(
            f"model.path: {type(model).__name__} changes its logits after the output head, so log-probs that are "
            f"computed from the head would be wrong; choose a model that does not do this"
        )
    logprobs_BT, *entropy_BT = rows.at_next_tokens(returned).unbind(-1)
    return logprobs_BT, entropy_BT[0] if entropy_BT else None


@contextmanager
def rounded_weights(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Lets the model compute in this block with weights that are rounded to `dtype`, as an engine has them. The passes
    keep their own precision, and the weights do not change."""
    kept: dict[torch.nn.Module, dict[str, torch.nn.Parameter | None]] = {}

    def put_rounded(module: torch.nn.Module, _: object) -> None:
        kept[module] = dict(module._parameters)
        for name, parameter in kept[module].items():
            if parameter is not None:
                rounded = parameter.detach().to(dtype).to(parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(rounded, requires_grad=False)

    def put_back(module: torch.nn.Module, *_: object) -> None:
        module._parameters.update(kept.pop(module, {}))

    # FSDP gathers the weights of a block of modules before these hooks, and drops them afterwards
    own = [module for module in model.modules() if module._parameters]
    hooks = [module.register_forward_pre_hook(put_rounded) for module in own]
    hooks += [module.register_forward_hook(put_back, always_call=True) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def head_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    support_NK: torch.Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_logits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns log softmax(hidden · weightᵀ / temperature) at the targets [N], and the entropies [N] if `with_entropy`.

    Results are float32 (float64 for float64 inputs) and differentiable once in hidden and weight. Gradients have the
    dtypes of the inputs. `chunk_logits` is by default the one of CHUNK_LOGITS for the device.

    With `support_NK`, the softmax is over the support of each token. It has token ids, each once, and negative numbers
    as padding. Each target must be in its support. Both results are 0 for a token without a support.
    """
    chunk_logits = chunk_logits or CHUNK_LOGITS[hidden_ND.device.type]
    options = (temperature, chunk_logits, with_entropy)
    if support_NK is None:
        logprobs_N, entropy_N = ChunkedHead.apply(hidden_ND, weight_VD, targets_N, *options)  # type: ignore[no-untyped-call]
    else:
        logprobs_N, entropy_N = SupportHead.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, targets_N, support_NK.long(), *options
        )
    return logprobs_N, entropy_N


def _check_positions(hidden_BSD: torch.Tensor, tokens_BS: torch.Tensor, *, model: PreTrainedModel) -> None:
    if hidden_BSD.shape[:2] != tokens_BS.shape:
        raise ConfigError(
            f"model.path: the output head of {type(model).__name__} gets hidden states of shape "
            f"{tuple(hidden_BSD.shape)} for tokens of shape {tuple(tokens_BS.shape)}; choose a model whose head reads "
            "every position"
        )


def _plain_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Returns the model's output head. Raises ConfigError if logits are not just its product with the hidden states."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        found = "with a bias" if isinstance(head, torch.nn.Linear) else f"of type {type(head).__name__}"
        raise ConfigError(
            f"model.path: {type(model).__name__} has an output head {found}, but log-probs can only be computed "
            "for a torch.nn.Linear without bias; choose another model"
        )
    config = model.config.get_text_config()
    for key in _LOGIT_KEYS:
        value = getattr(config, key, None)
        if value is not None and value != 1.0:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {key} = {value} in its config, which changes logits after the "
                f"output head, so log-probs that are computed from the head would be wrong; choose a model without it"
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
