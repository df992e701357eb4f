"""A plain pass gives the log-probs of a pass of packed rows, and its stated slopes give the gradient of autograd, also
with centering."""

from pathlib import Path

import msgspec
import pytest
import torch
from tiny_groups import VOCABULARY, make_model, with_tops
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.objective import Objective, Reinforce, centered_kernel
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import SUPPORT, TOP_IDS, TOP_LOGPROBS, WIDE_FIELDS
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION
from asyncrl.ranks.witnessed import listed_tops
from asyncrl.witness.objective import Derivatives
from asyncrl.witness.plain_pass import plain_attention, plain_pass

TEMPERATURE = 0.7
ROWS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], [30, 31, 32, 33, 34]]
CPU = torch.device("cpu")
OBJECTIVES = [Objective(surrogate=Reinforce(), centering="score"), PRESETS["score_centering"].objective]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "model")


def loaded(folder: Path, attention: str) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return model.train(False)


def supports() -> list[list[list[int]]]:
    """Returns the support of each next token: its own id and some others; none for a token that was not sampled."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for row in ROWS:
        others = torch.randint(0, VOCABULARY, (len(row) - 1, 5), generator=draw).tolist()
        found.append([sorted({token, *more}) for token, more in zip(row[1:], others, strict=True)])
        found[-1][1] = []
    return found


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["alone", "with a cap"])
@pytest.mark.parametrize("supported", [None, 4, 6], ids=["all tokens", "a part of the support listed", "all listed"])
def test_a_row_alone_has_its_log_probs_and_its_gradient(
    folder: Path, supported: int | None, objective: Objective
) -> None:
    width, chosen = max(map(len, ROWS)), supports()
    torch.manual_seed(2)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    lengths = torch.tensor([len(row) for row in ROWS])
    support = torch.full((len(ROWS), width, 6), -1)
    for b, row in enumerate(chosen):
        for t, tokens in enumerate(row):
            support[b, t + 1, : len(tokens)] = torch.tensor(tokens)
    fast = loaded(folder, ATTENTION)
    data = with_tops(BatchedDataDict(input_ids=ids, input_lengths=lengths, token_mask=torch.ones(ids.shape)))
    if supported is not None:
        listed = support[..., :supported]
        log_q = torch.randn(listed.shape).masked_fill(listed < 0, -torch.inf).log_softmax(-1) - 0.1 * (supported < 6)
        data |= {SUPPORT: support, TOP_IDS: listed, TOP_LOGPROBS: log_q.masked_fill(listed < 0, 0.0)}
    rows = ModelRows.of(data, packed=True, wide=WIDE_FIELDS)
    logprobs, entropies, centering = model_logprobs(
        fast,  # type: ignore[arg-type]
        rows,
        temperature=TEMPERATURE,
        with_entropy=True,
        centered_kernel=centered_kernel(objective),
    )
    assert entropies is not None
    assert centering is not None
    draw = torch.Generator().manual_seed(1)
    by_logprob, by_entropy, by_centering = (torch.randn(logprobs.shape, generator=draw) for _ in range(3))
    inside = torch.arange(width - 1) < (lengths - 1).unsqueeze(1)
    summed = by_logprob * logprobs + by_entropy * entropies + by_centering * centering
    (summed * inside).sum().backward()  # type: ignore[no-untyped-call]
    plain = loaded(folder, "sdpa")
    with plain_attention(plain, longest=8):
        for b, row in enumerate(ROWS):
            found = plain_pass(
                plain,
                row,
                temperature=TEMPERATURE,
                device=CPU,
                supports=None if supported is None else chosen[b],
                slopes=Derivatives(
                    *(each[b, : len(row) - 1].tolist() for each in (by_logprob, by_entropy, by_centering))
                ),
                axes=msgspec.to_builtins(objective),
                tops=listed_tops({name: rows[b] for name, rows in data.items()}, slice(1, len(row))),
            )
            assert found == pytest.approx(logprobs[b, : len(row) - 1].tolist(), abs=1e-5)
    assert plain.config._attn_implementation == "sdpa"
    for (name, one), (_, other) in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad - other.grad).norm()) <= 1e-4 * float(one.grad.norm()), name


def test_a_pass_without_slopes_makes_no_gradient(folder: Path) -> None:
    model = loaded(folder, "sdpa")
    with plain_attention(model, longest=2000):
        assert model.config._attn_implementation == "sdpa"
        assert len(plain_pass(model, ROWS[0], temperature=1.0, device=CPU)) == len(ROWS[0]) - 1
    assert all(parameter.grad is None for parameter in model.parameters())
