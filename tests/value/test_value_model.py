"""V(before token t) is entry t. It does not depend on token t or later ones, and is equal padded, packed and alone."""

import pytest
import torch
from rounding import OUTPUT, assert_reordered, assert_within, spread
from tiny_groups import VOCABULARY, make_batch, make_model, rows_of

from asyncrl.value.model import ValueModel, load_value_model, model_values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("value") / "model"))


def loaded(path: str, *, packed: bool = False) -> ValueModel:
    """Loads the model, and sets a head that is not zero."""
    model = load_value_model(path, packed=packed).train(False)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.head.weight)
    return model


@torch.no_grad()
def test_a_new_critic_says_nothing_and_its_head_learns_at_once(path: str) -> None:
    model, batch = load_value_model(path, packed=False).train(False), make_batch()
    assert not model_values(model, rows_of(batch["input_ids"])).any()
    with torch.enable_grad():
        model_values(model, rows_of(batch["input_ids"])).sum().backward()
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.abs().min() > 0
    assert model.head.weight.dtype == torch.float32


@torch.no_grad()
def test_a_value_is_of_the_tokens_before_it_and_of_no_other(path: str) -> None:
    model, tokens_BS = loaded(path), make_batch()["input_ids"][:1]
    before_BS = model_values(model, rows_of(tokens_BS))
    assert before_BS[0, 0] == 0
    changed_BS = tokens_BS.clone()
    changed_BS[0, 3] = (changed_BS[0, 3] + 1) % VOCABULARY
    after_BS = model_values(model, rows_of(changed_BS))
    assert torch.equal(before_BS[:, :4], after_BS[:, :4]), "the value before token 3 must not depend on token 3"
    assert (before_BS[:, 4:] - after_BS[:, 4:]).abs().min() > 1e-4


@torch.no_grad()
def test_padded_packed_and_alone_give_the_same_values(path: str) -> None:
    padded, packed, batch = loaded(path), loaded(path, packed=True), make_batch()
    lengths_B = batch["input_lengths"]
    padded_BS = model_values(padded, rows_of(batch["input_ids"]))
    packed_BS = model_values(packed, rows_of(batch["input_ids"], packed_lengths_B=lengths_B))
    bound = OUTPUT * float(padded_BS.abs().max())
    for i, length in enumerate(lengths_B.tolist()):
        hidden_SD = padded.backbone(input_ids=batch["input_ids"][i : i + 1, :length]).last_hidden_state[0]
        alone_T = (hidden_SD.double() @ padded.head.weight[0].double())[:-1].float()
        assert_within(padded_BS[i, 1:length], alone_T, bound=bound)
        assert_within(packed_BS[i, 1:length], alone_T, bound=bound)
        assert not packed_BS[i, length:].any()
    assert not padded_BS[:, 0].any()
    assert not packed_BS[:, 0].any()


@torch.no_grad()
def test_the_head_adds_up_in_float32_under_a_backbone_in_bfloat16(path: str) -> None:
    model, tokens_BS = loaded(path), make_batch()["input_ids"]
    model.backbone.to(torch.bfloat16)
    hidden_BSD = model.backbone(input_ids=tokens_BS).last_hidden_state
    assert hidden_BSD.dtype == torch.bfloat16
    expected_BT = (hidden_BSD.double() @ model.head.weight[0].double())[:, :-1].float()
    values_BS = model_values(model, rows_of(tokens_BS))
    assert values_BS.dtype == torch.float32
    assert_reordered(values_BS[:, 1:], expected_BT, spread=spread(hidden_BSD.shape[-1]))
