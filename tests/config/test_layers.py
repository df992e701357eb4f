"""A configuration from Python: mappings are layers as files are."""

from pathlib import Path

import pytest

from asyncrl.config.load import config_origins, load_config
from asyncrl.errors import ConfigError


def test_mappings_and_files_are_merged_from_left_to_right(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("run: {name: base, seed: 4}\nlearner: {total_steps: 9}\n")
    config = load_config(
        [{"run": {"name": "first", "seed": 1}}, str(tmp_path / "base.yaml"), {"run.name": "last"}],
        ["learner.total_steps=7"],
    )
    assert (config.run.name, config.run.seed, config.learner.total_steps) == ("last", 4, 7)


def test_dotted_keys_and_sections_of_one_mapping_are_merged() -> None:
    config = load_config([{"learner.optimizer.learning_rate": 1e-3, "learner": {"optimizer": {"warmup_steps": 2}}}])
    assert (config.learner.optimizer.learning_rate, config.learner.optimizer.warmup_steps) == (1e-3, 2)


def test_a_path_is_text_for_the_configuration(tmp_path: Path) -> None:
    assert load_config([{"run": {"dir": tmp_path}}]).run.dir == tmp_path


def test_an_error_names_the_mapping_that_set_the_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([{"run": {"name": "a"}}, {"run.sead": 1, "learner.total_steps": "8"}])
    assert str(caught.value).splitlines() == [
        "unknown key run.sead (in mapping 2): did you mean run.seed?",
        'learner.total_steps = "8" (in mapping 2): must be a whole number; write it without quotes',
    ]


def test_a_value_that_a_file_could_not_hold_is_refused_with_its_mapping() -> None:
    with pytest.raises(ConfigError, match=r"mapping 1: a config may hold only text, numbers, lists and mappings"):
        load_config([{"run": {"name": object()}}])


def test_the_callers_mapping_is_left_as_it_is() -> None:
    mine = {"run": {"name": "a"}, "run.seed": 3}
    load_config([mine, {"run.name": "b"}])
    assert mine == {"run": {"name": "a"}, "run.seed": 3}


def test_origins_tell_mappings_apart() -> None:
    origins = config_origins([{"model": {"tiny": {}}}, {"model.path": "m"}], [])
    assert origins["model", "tiny"] == "in mapping 1"
    assert origins["model", "path"] == "in mapping 2"


def test_a_later_name_of_an_optimizer_leaves_out_what_belongs_to_the_earlier_one() -> None:
    """The order of overrides has no meaning, so they are one layer."""
    file = {"learner": {"optimizer": {"betas": [0.9, 0.99], "weight_decay": 0.1, "learning_rate": 0.5}}}
    sgd = ["learner.optimizer.options={momentum: 0.9}", "learner.optimizer.name=torch.optim:SGD"]
    for overrides in (sgd, sgd[::-1]):
        section = load_config([file], overrides).learner.optimizer
        assert (section.betas, section.weight_decay, section.learning_rate) == ((0.9, 0.95), 0.0, 0.5)
        assert (section.name, section.options) == ("torch.optim:SGD", {"momentum": 0.9})
    earlier = {"learner": {"optimizer": {"name": "mine:Other", "options": {"momentum": 0.9}}}}
    one_option = ["learner.optimizer.options.nesterov=true", "learner.optimizer.name=torch.optim:SGD"]
    for overrides in (one_option, one_option[::-1]):
        assert load_config([earlier], overrides).learner.optimizer.options == {"nesterov": True}
    saved = {"learner": {"optimizer": section.model_dump(mode="json")}}
    again = load_config([saved, {"learner.optimizer.name": "torch.optim:SGD"}]).learner.optimizer
    assert again.options == {"momentum": 0.9}, "it is the same name"
    back = load_config([saved, {"learner.optimizer.name": "adamw", "learner.optimizer.eps": 0.5}]).learner.optimizer
    assert (back.own, back.options, back.eps) == (None, {}, 0.5)
    assert load_config([file, {"learner.optimizer.name": "adamw"}]).learner.optimizer.betas == (0.9, 0.99)
