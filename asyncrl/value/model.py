"""The critic's model: a language model's backbone, and a linear head with one number for each token.

Invariants: packed rows get the same values as each row alone. The head computes in float32 for every dtype of the
backbone, because returns may differ by less than the rounding of bfloat16.

Legend: B rows, S tokens, T = S − 1 next tokens, R sequences (rows or branches), D hidden width.
"""

from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from asyncrl.ranks.loss_pass import aligned
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION


class ValueModel(torch.nn.Module):
    """`backbone` with a scalar head.

    The head starts at zero, so an untrained critic predicts 0, and the first advantages are discounted rewards. A
    random head would add noise of the size of the hidden states, which predicts nothing.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = torch.nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        # accelerate reads this attribute of a transformers model to find the layers that it shards one by one
        self._no_split_modules = backbone._no_split_modules

    def get_input_embeddings(self) -> torch.nn.Module:
        """Returns the input embeddings. accelerate shards them separately if the model has this method."""
        return self.backbone.get_input_embeddings()

    def forward(self, **model_inputs: Any) -> torch.Tensor:
        """Returns [B, S] float32: entry t is the value of the state after token t."""
        hidden_BSD = self.backbone(**model_inputs, use_cache=False).last_hidden_state
        worth_BS1 = torch.nn.functional.linear(hidden_BSD.float(), self.head.weight.float())
        return worth_BS1.squeeze(-1)


def load_value_model(path: str, *, packed: bool) -> ValueModel:
    """Loads the backbone of the checkpoint at `path` in float32, and adds a new head."""
    attention = ATTENTION if packed else "sdpa"
    return ValueModel(
        AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)
    )


def model_values(model: torch.nn.Module, rows: ModelRows) -> torch.Tensor:
    """Returns [B, S]: entry t is V(before token t). It is 0 for the first token of a row or branch. Differentiable.

    Entries beyond a row's length are 0 if the rows are packed or have branches. Otherwise they have no meaning.
    """
    worth: torch.Tensor = model(**rows.inputs)
    before_RT = worth[:, :-1] if rows.packed is None else rows.packed.at_tokens(worth.unsqueeze(-1)).squeeze(-1)
    return rows.joined(aligned(before_RT))


def model_states(model: ValueModel, rows: ModelRows) -> torch.Tensor:
    """Returns [B, S]: entry t is a number of the backbone's state before token t, in the manner of a log-prob (the
    log-softmax of the state at its first dimension). When a rank starts, `check_start` compares these numbers of rows
    that share a pass with those of each row alone. It does not compare values, because an untrained critic predicts 0
    for all states."""
    found: list[torch.Tensor] = []
    hook = model.backbone.register_forward_hook(lambda *args: found.append(args[-1].last_hidden_state))
    try:
        model(**rows.inputs)
    finally:
        hook.remove()
    number_RL1 = found[0].float().log_softmax(-1)[..., :1]
    before_RT1 = number_RL1[:, :-1] if rows.packed is None else rows.packed.at_tokens(number_RL1)
    return rows.joined(aligned(before_RT1.squeeze(-1)))
