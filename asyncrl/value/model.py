"""The critic's model: a language model's backbone, and one linear number at each token.

What must hold: packed rows get the values that each row alone would get. Sums over the head are float32 whatever the
backbone computes in: returns differ by less than bfloat16's rounding of them.

Legend: B rows, S tokens, T = S − 1 next tokens, N tokens of all rows, D hidden width.
"""

from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from asyncrl.policy.micro_batch import aligned
from asyncrl.policy.packed import ATTENTION, PackedRows


class ValueModel(torch.nn.Module):
    """`backbone` with a scalar head.

    The head begins at zero: an untrained critic then says nothing, and the first advantages are discounted rewards. A
    random head would add a noise of the hidden states' size, which is no prediction of anything.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = torch.nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        # what accelerate asks of a transformers model to find the layers that it shards one by one
        self._no_split_modules = backbone._no_split_modules

    def get_input_embeddings(self) -> torch.nn.Module:
        """For accelerate, which shards the largest matrix by itself."""
        return self.backbone.get_input_embeddings()

    def forward(self, **model_inputs: Any) -> torch.Tensor:
        """[B, S] float32: entry t is what the state after token t is worth."""
        hidden_BSD = self.backbone(**model_inputs, use_cache=False).last_hidden_state
        worth_BS1 = torch.nn.functional.linear(hidden_BSD.float(), self.head.weight.float())
        return worth_BS1.squeeze(-1)


def load_value_model(path: str, *, packed: bool) -> ValueModel:
    """The backbone of the checkpoint at `path`, in float32, with a new head."""
    attention = ATTENTION if packed else "sdpa"
    return ValueModel(AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=attention))


def model_values(
    model: torch.nn.Module, input_ids_BS: torch.Tensor, *, packed_lengths_B: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, S]: entry t is V(before token t), entry 0 is 0. Differentiable.

    No attention mask: padding is on the right, where causal attention never looks. With `packed_lengths_B` the model
    sees no padding at all, and what lies beyond a row's length is 0; without, it means nothing.
    """
    if packed_lengths_B is None:
        before_BT: torch.Tensor = model(input_ids=input_ids_BS)[:, :-1]
    else:
        packed = PackedRows.of(input_ids_BS, lengths_B=packed_lengths_B)
        worth_1N1 = model(**packed.model_inputs()).unsqueeze(-1)
        before_BT = packed.padded(worth_1N1, width=input_ids_BS.shape[1] - 1).squeeze(-1)
    return aligned(before_BT)
