"""Losses by import path: every signature that the policy can call is accepted, and any other one is refused before a
run. Their options in YAML are keyword arguments, which are judged by the signature."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from asyncrl.algorithms.checks import check_algorithm
from asyncrl.algorithms.loss import build_loss, load_loss
from asyncrl.algorithms.presets import own_loss
from asyncrl.config.import_path import OwnCallable
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.named_code import named_code
from asyncrl.errors import ConfigError


def by_position(logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def by_keyword(*, next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def of_logprobs(*, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any) -> Any: ...


def of_unknown_input(*, data: Any, global_valid_seqs: Any, global_valid_toks: Any, hidden_states: Any) -> Any: ...


def without_counts(next_token_logits: Any, data: Any) -> Any: ...


def of_another_kind(next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def failing_factory() -> Any:
    raise KeyError("beta")


def capped(
    scores: Any,
    rows: Any,
    global_valid_seqs: Any,
    global_valid_toks: Any,
    bounds: tuple[float, float],
    cap: float = 2.0,
) -> Any:
    return scores * cap, {"lo": bounds[0]}


class Centred:
    input_type = "logprob"
    columns = ("advantages",)

    def __init__(self, cap: float, *, kind: Literal["mean", "median"] = "mean", note=None) -> None:  # type: ignore[no-untyped-def]
        self.options = cap, kind, note

    def __call__(
        self, *, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any
    ) -> Any: ...


def with_option(
    *, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any, beta: float
) -> Any: ...


@dataclass
class Fields:
    cap: float

    def __call__(self, next_token_logits: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any: ...


def unresolved(cap: "Unknown" = 1.0) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return Fields(cap)


def own(name: str, **options: Any) -> OwnCallable:
    return OwnCallable(path=f"{__name__}:{name}", options=options)


of_logprobs.input_type = "logprob"  # type: ignore[attr-defined]
with_option.input_type = "logprob"  # type: ignore[attr-defined]
with_option.columns = ("rewards",)  # type: ignore[attr-defined]
of_another_kind.input_type = "hidden"  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [by_position, by_keyword, of_logprobs])
def test_a_loss_that_the_policy_can_call_is_taken_as_it_is(loss: Any) -> None:
    assert load_loss(own(loss.__name__)) is loss


def test_a_loss_of_logits_is_refused_with_supports() -> None:
    loss = f"algorithm.loss={__name__}:by_position"
    with pytest.raises(ConfigError, match="reads the logits of all tokens") as caught:
        build_loss(load_config([], [loss, "generator.top_k=8"]))
    assert "generator.top_k" in str(caught.value)
    assert build_loss(load_config([], [loss])) is by_position
    of_logprobs_too = [f"algorithm.loss={__name__}:of_logprobs", "generator.top_k=8"]
    assert build_loss(load_config([], of_logprobs_too)) is of_logprobs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of_unknown_input", "cannot be called as a loss: "),
        ("without_counts", "it must take (next_token_logits, data, global_valid_seqs, global_valid_toks)"),
        ("of_another_kind", "cannot be called as a loss: the loss's input_type is 'hidden'; it must be one of 'logit'"),
        ("failing_factory", "was called without arguments to make a loss, and it raised KeyError: 'beta'"),
    ],
)
def test_any_other_callable_is_refused_with_the_reason(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_loss(own(name))
    assert words in str(caught.value)
    assert "algorithm.loss" in str(caught.value)


def test_the_options_of_a_class_are_the_arguments_of_its_constructor() -> None:
    loss: Any = load_loss(own("Centred", cap=3, kind="median", note={"any": [1]}))
    assert loss.options == (3.0, "median", {"any": [1]})
    assert isinstance(loss.options[0], float)
    assert load_loss(own("Fields", cap=0.5)) == Fields(cap=0.5)
    assert load_loss(own("unresolved", cap="as it is")) == Fields("as it is")  # type: ignore[arg-type]


def test_the_options_of_a_function_are_arguments_of_every_call_and_a_list_becomes_a_tuple() -> None:
    loss: Any = pickle.loads(pickle.dumps(load_loss(own("capped", bounds=[0.5, 2]))))
    assert loss(3.0, {}, global_valid_seqs=1, global_valid_toks=1) == (6.0, {"lo": 0.5})
    loss = load_loss(own("capped", bounds=[0.5, 2], cap=4.0))
    assert loss(3.0, {}, global_valid_seqs=1, global_valid_toks=1) == (12.0, {"lo": 0.5})


def test_a_loss_keeps_its_attributes_with_options() -> None:
    of_kind: Any = load_loss(own("with_option", beta=2.0))
    assert of_kind.input_type == "logprob"
    assert of_kind.columns == ("rewards",)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "Centred",
            {"cpa": 3.0},
            "algorithm.loss.cpa: M:Centred has no such option; its options are cap, kind, note; ",
        ),
        (
            "Centred",
            {"cap": 3.0, "kind": "men"},
            "algorithm.loss.kind = 'men': M:Centred annotates it as typing.Literal",
        ),
        ("Centred", {}, "algorithm.loss: M:Centred needs a value for cap, which is missing; add algorithm.loss.cap"),
        ("Centred", {"cap": "3"}, "algorithm.loss.cap = '3': M:Centred annotates it as float, but this is not one"),
        ("Centred", {"cap": True}, "algorithm.loss.cap = True: "),
        ("Fields", {"cap": None}, "algorithm.loss.cap = None: M:Fields annotates it as float"),
        ("capped", {"bounds": [1]}, "algorithm.loss.bounds = [1]: M:capped annotates it as tuple[float, float]"),
        ("capped", {"bounds": [1, 2], "rows": 1}, "algorithm.loss.rows: M:capped has no such option; its options are "),
        ("of_logprobs", {"data": 1}, "algorithm.loss.data: M:of_logprobs has no such option; its options are none"),
    ],
)
def test_options_that_do_not_fit_are_refused_one_by_one(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_loss(load_config([{"algorithm.loss": {"name": f"{__name__}:{name}", **options}}]))
    assert str(caught.value).startswith(words.replace("M:", f"{__name__}:"))


def test_a_preset_has_no_options_of_a_callable() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.name = gspo: only a loss of your own"):
        check_algorithm(load_config([{"algorithm.loss": {"name": "gspo", "cap": 3.0}}]))


def test_options_are_settings_like_any_other(tmp_path: Path) -> None:
    """They are in the recorded configuration, the command line changes one of them or replaces all, and a run that is
    only read names the code."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f'algorithm: {{loss: {{name: "{__name__}:Centred", cap: 3.0, note: a}}}}\nstaleness: {{max_versions: 0}}\n'
    )
    config = load_config([path], ["algorithm.loss.kind=median"])
    recorded = load_config([yaml.safe_load(dump_config(config))])
    assert recorded == config
    assert own_loss(recorded.algorithm) == own("Centred", cap=3.0, note="a", kind="median")
    assert config.algorithm.loss_name == f"{__name__}:Centred"
    assert config != load_config([path], ["algorithm.loss.kind=mean"])
    assert named_code(config) == {"algorithm.loss.name": f"{__name__}:Centred"}
    replaced = load_config([path], [f"algorithm.loss={{name: '{__name__}:Fields', cap: 1.0}}"])
    assert build_loss(replaced) == Fields(cap=1.0)
    assert load_config([path], ["algorithm.loss=gspo"]).algorithm.loss_name == "gspo"
    assert check_algorithm(config) == []
