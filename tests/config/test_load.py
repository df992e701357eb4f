"""Loading: precedence, strictness, error lines, and the settings that the deployments of one run must share."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config, first_difference, flat_config, load_config, shared_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _lines(files: list[Path], overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value).splitlines()


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def test_nothing_given_is_the_schema_with_its_defaults() -> None:
    assert load_config([], []) == Config()


def test_files_merge_left_to_right_and_overrides_come_last(tmp_path: Path) -> None:
    base = _write(tmp_path / "a.yaml", "run: {name: a, seed: 1}\nenvironment: {options: {task: x, size: 3}}\n")
    mine = _write(tmp_path / "b.yaml", "run: {seed: 2}\nenvironment: {options: {size: 4}}\n")
    config = load_config([base, mine], ["run.seed=3", "environment.options.size=5"])
    assert (config.run.name, config.run.seed) == ("a", 3)
    assert config.environment.options == {"task": "x", "size": 5}
    assert load_config([base, mine], []).run.seed == 2


def test_lists_are_replaced_not_joined(tmp_path: Path) -> None:
    base = _write(tmp_path / "a.yaml", "generator: {stop: [a, b]}\n")
    assert load_config([base], ['generator.stop=["c"]']).generator.stop == ["c"]


def test_merging_leaves_yaml_aliases_of_the_first_file_alone(tmp_path: Path) -> None:
    base = _write(
        tmp_path / "a.yaml", "environment: {options: &shared {size: 1}}\ndata: {dataset: 'a:b', options: *shared}\n"
    )
    config = load_config([base], ["data.options.size=2"])
    assert (config.environment.options["size"], config.data.options["size"]) == (1, 2)


@pytest.mark.parametrize("key", sorted(_leaves(Config().model_dump(mode="json"))))
def test_every_field_accepts_its_own_default_beside_unset_neighbours(key: str, tmp_path: Path) -> None:
    value = _leaves(Config().model_dump(mode="json"))[key]
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    assert load_config([_write(tmp_path / "one.json", str(tree).replace("None", "null").replace("True", "true"))], [])


def test_dumped_config_loads_as_an_equal_config(tmp_path: Path) -> None:
    config = load_config(
        [],
        [
            "model.tiny={}",
            "data.path=rows.jsonl",
            "learner.optimizer.betas=[0.5, 0.75]",
            "algorithm.overrides={weight: {hi: .inf}}",
            "environment.options={a: '1e-3', b: 2026-01-31, c: [1e-3, null]}",
        ],
    )
    assert load_config([_write(tmp_path / "resolved.yaml", dump_config(config))], []) == config
    assert config.algorithm.overrides == {"weight": {"hi": float("inf")}}


def test_quickstart_loads() -> None:
    config = load_config([Path(__file__).parents[2] / "configs" / "quickstart.yaml"], [])
    assert config.run.name == "quickstart"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("generator.replcas=2", "did you mean generator.replicas?"),
        ("generatr.replicas=2", "did you mean generator?"),
        ("rollouts.min_replicas=2", "did you mean generator?"),
        ("learner.max_length=2", "did you mean model.max_length?"),
        ("learner.optimizer.weight_decy=2", "did you mean learner.optimizer.weight_decay?"),
        ("staleness.max_lag_publication=2", "did you mean weights.max_lag_publications?"),
        ("buffer.startup_timeout_s=2", "or generator.startup_timeout_s or learner.startup_timeout_s?"),
        ("replicas=2", "did you mean generator.replicas?"),
        ("model.tiny.zzz=2", "the keys of `model.tiny` are seed, hidden_size"),
        ("zzz=2", "the sections are run, model"),
    ],
)
@pytest.mark.fault("F28")
def test_unknown_key_says_what_was_meant(override: str, hint: str) -> None:
    [line] = _lines([], [override])
    assert line.startswith("unknown key")
    assert "(on the command line)" in line
    assert hint in line


@pytest.mark.parametrize("key", ["presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p"])
@pytest.mark.fault("F28")
def test_what_would_change_the_sampled_distribution_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"generator\.{key} \(on the command line\): is not supported; remove it\. .*importance weight",
    ):
        load_config([], [f"generator.{key}=0.9"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("generator.replicas=0", "generator.replicas = 0 (on the command line): must be greater than or equal to 1"),
        ("run.stall_timeout_s=0", "run.stall_timeout_s = 0 (on the command line): must be greater than 0"),
        ("data.heldout_fraction=1", "data.heldout_fraction = 1 (on the command line): must be less than 1"),
        (
            "metrics.learner_port=70000",
            "metrics.learner_port = 70000 (on the command line): must be less than or equal to 65535",
        ),
        ("generator.replicas=true", "generator.replicas = true (on the command line): must be a whole number"),
        ("generator.gpus=true", "generator.gpus = true (on the command line): must be a number"),
        ("generator.replicas='2'", "must be a whole number; write it without quotes"),
        ("learner.optimizer.eps='1e-8'", "must be a number; write it without quotes"),
        ("data.shuffle='false'", "must be true or false; write it without quotes"),
        ("data.prompt_template={word}", """must be text; write '"{word}"', with the quotes: without them YAML reads"""),
        ("generator.replicas=2.0", "must be a whole number; write 2"),
        ("data.shuffle=1", "must be true or false"),
        ("data.shuffle=off", 'data.shuffle = "off" (on the command line): must be true or false; write false'),
        ("generator.enforce_eager=Yes", "must be true or false; write true"),
        ("learner.total_steps=1_000", "must be a whole number; write 1000"),
        ("learner.total_steps=1e3", "must be a whole number; write 1000"),
        ("run.name=12", """must be text; write '"12"', with the quotes"""),
        ("run.name=a/b", "must match pattern '^[a-zA-Z0-9]"),
        ("generator.stop=x", 'must be a list; write ["x"]'),
        ("data.options=3", "must be a mapping of keys"),
        ("model=null", "must be a section (a mapping of keys); set a key of the section, or remove the line"),
        ("data.on_bad_row=skp", "must be 'refuse' or 'skip'; did you mean 'skip'?"),
        ("generator.temperature=.inf", "must be a finite number"),
        ("generator.temperature=.nan", "generator.temperature = NaN"),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas.1 (on the command line): is missing"),
        (
            "learner.optimizer.betas=[0.9, 1.0]",
            "learner.optimizer.betas.1 = 1.0 (on the command line): must be less than 1",
        ),
    ],
)
@pytest.mark.fault("F28")
def test_wrong_value_is_refused_with_key_value_limit_and_mend(override: str, line: str) -> None:
    [found] = _lines([], [override])
    assert line in found


WORDS = {
    "data.chat": ("off", "off"),
    "learner.mixed_precision": ("no", "no"),
    "run.name": ("on", "on"),
    "environment.options.task": ("yes", "yes"),
    "learner.optimizer.learning_rate": ("1e-3", 0.001),
    "generator.rollout_timeout_s": ("1e3", 1000.0),
    "run.seed": ("010", 10),
}
"""Values of keys as text, and what they mean in YAML 1.2."""


@pytest.mark.parametrize("key", WORDS)
def test_values_are_read_by_yaml_1_2_in_files_and_overrides_and_written_back(key: str, tmp_path: Path) -> None:
    text, value = WORDS[key]
    section, *between, name = key.split(".")
    tree = f"{name}: {text}"
    for part in reversed([section, *between]):
        tree = f"{part}: {{{tree}}}"
    for config in (load_config([], [f"{key}={text}"]), load_config([_write(tmp_path / "a.yaml", tree)], [])):
        assert flat_config(config)[key] == value
        assert flat_config(load_config([_write(tmp_path / "b.yaml", dump_config(config))], []))[key] == value


@pytest.mark.fault("F28")
@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://bucket/x.jsonl", "https://huggingface.co/owner/name", "hf://o/n"]
)
@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("run.dir", "name a folder, and set run.mirror to the URL"),
        ("model.path", "(aws s3 sync, gcloud storage rsync, hf download), and name the model's folder"),
        ("data.path", "(aws s3 sync, gcloud storage rsync, hf download), and name the file or folder of the data"),
        (
            "data.mixture.0.data.path",
            "(aws s3 sync, gcloud storage rsync, hf download), and name the file or folder of the data",
        ),
        (
            "eval.sets.hard.data.path",
            "(aws s3 sync, gcloud storage rsync, hf download), and name the file or folder of the data",
        ),
        ("weights.folder", "name a folder that the learner and all generators share"),
    ],
)
def test_a_url_is_refused_where_a_file_or_folder_is_meant(key: str, advice: str, url: str) -> None:
    override = f"{key}={url}"
    if ".data." in key:
        group = "[{name: a, data: {dataset: jsonl, path: %s}}]" if "mixture" in key else "{hard: {data: {path: %s}}}"
        override = f"{'.'.join(key.split('.')[:2])}={group % url}"
    (line,) = _lines([], [override])
    assert line.startswith(f'{key} = "{url}" (on the command line): is a URL, and only a path works here')
    assert advice in line


def test_a_folder_and_the_name_of_a_model_or_dataset_on_the_hub_are_not_urls() -> None:
    config = load_config([], ["run.dir=/mnt/s3/runs", "model.path=owner/name", "data.dataset=hf", "data.path=o/n"])
    assert (str(config.run.dir), config.model.path, str(config.data.path)) == ("/mnt/s3/runs", "owner/name", "o/n")


def test_in_a_file_text_needs_one_pair_of_quotes(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "run: {name: 12}\ndata:\n  prompt_template: {word}\n")
    name, template = _lines([file], [])
    assert name.endswith('must be text; write "12", with the quotes')
    assert template.endswith('must be text; write "{word}", with the quotes: without them YAML reads a mapping')


@pytest.mark.parametrize(
    "override", ["staleness.max_versions=four", "staleness.max_versions='2.5'", "data.shuffle=maybe", "run.seed='[1'"]
)
@pytest.mark.fault("F28")
def test_quotes_are_not_blamed_for_text_that_means_nothing_else(override: str) -> None:
    [line] = _lines([], [override])
    assert "must be" in line
    assert "quotes" not in line


def test_all_violations_are_reported_at_once_with_where_each_was_set(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "run: {seed: -1}\nlearner: {rank: 2, optimizer: {eps: 0}}\n")
    lines = _lines([file], ["buffer.max_attempts=0"])
    assert len(lines) == 4
    assert sum(f"(in {file})" in line for line in lines) == 3
    assert sum("(on the command line)" in line for line in lines) == 1


def test_a_lone_violation_carries_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["run.seed=-1"])
    assert "run.seed" in str(caught.value)


def test_unreadable_files_and_overrides_are_reported_together(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    listing = _write(tmp_path / "list.yaml", "- 1\n")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    lines = _lines([missing, listing, binary, tmp_path], ["noequals", "a..b=1", "=1", "run.name=[1"])
    assert len(lines) == 8
    assert "no such file" in lines[0]
    assert "holds a list" in lines[1]
    assert "cannot be read" in lines[2]
    assert "is a directory; name a file" in lines[3]
    assert all("is not an override" in line for line in lines[4:7])
    assert "run.name=[1" in lines[7]


def test_a_file_without_its_option_is_answered_with_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "my config", "run: {}\n")
    lines = _lines([], ["my config", "configs/quickstart.yaml", "b.yml", "run.name"])
    meant = ["`-c 'my config'`", "`-c configs/quickstart.yaml`", "`-c b.yml`"]
    assert [line.partition("did you mean ")[2] for line in lines] == [*(f"{each}?" for each in meant), ""]


@pytest.mark.fault("F28")
def test_text_that_is_no_yaml_is_answered_with_the_override_to_type() -> None:
    [line] = _lines([], ["data.prompt_template={wrd}>"])
    typed = """data.prompt_template='"{wrd}>"'"""
    assert line.startswith("override 'data.prompt_template={wrd}>', line 1, column 6: not YAML (")
    assert line.endswith(f"quotes: {typed}")
    [override] = shlex.split(typed)  # the argument that the shell would pass
    assert load_config([], [override]).data.prompt_template == "{wrd}>"


@pytest.mark.fault("F28")
def test_a_file_that_is_no_yaml_is_told_from_a_config_with_a_mistake(tmp_path: Path) -> None:
    [line] = _lines([_write(tmp_path / "README.md", "# asyncrl\n\n**vLLM engines generate** and: more\n")], [])
    assert "README.md, line 3, column " in line
    assert "not YAML (" in line
    assert line.endswith("or name a YAML config with -c")
    [line] = _lines([_write(tmp_path / "a.yaml", "run: {1: x}\n")], [])
    assert "name a YAML config" not in line


@pytest.mark.parametrize("text", ["run: !!set {a}", "run: !!binary aGk=", "run: &r {name: *r}"])
def test_yaml_that_is_no_plain_data_is_refused(text: str, tmp_path: Path) -> None:
    [line] = _lines([_write(tmp_path / "a.yaml", text)], [])
    assert "only text, numbers, lists and mappings" in line


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_config([_write(tmp_path / "a.yaml", "# nothing yet\n")], []) == Config()


def test_a_mapping_over_an_unset_section_sets_it(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.yaml", "model: {tiny: null}\n")
    tiny = load_config([file], ["model.tiny.layers=2"]).model.tiny
    assert tiny is not None
    assert tiny.layers == 2


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=/elsewhere",
        "metrics.learner_port=9000",
        "ray.object_store_mb=100",
        "generator.replicas=3",
        "generator.max_concurrent_groups=3",
        "generator.enforce_eager=false",
        "learner.threads=3",
    ],
)
def test_deployments_may_differ_in_places_and_sizes(override: str) -> None:
    assert first_difference(shared_config(load_config([], [])), shared_config(load_config([], [override]))) is None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.seed=1", "run.seed"),
        ("staleness.max_versions=5", "staleness.max_versions"),
        ("generator.temperature=0.5", "generator.temperature"),
        ("environment.options={size: 3}", "environment.options"),
        ("environment.options.size=4", "environment.options"),
        ("model.tiny.layers=1", "model.tiny"),
        ("learner.ranks=2", "learner.ranks"),
    ],
)
def test_deployments_must_agree_on_what_the_run_means(override: str, key: str) -> None:
    ours, theirs = shared_config(load_config([], [])), shared_config(load_config([], [override]))
    assert first_difference(ours, theirs) == key
    assert first_difference(theirs, ours) is not None


def test_first_difference_finds_keys_that_only_one_side_has() -> None:
    assert first_difference({"a": 1}, {"a": 1, "b": None}) == "b"
    assert first_difference({"a": 1, "b": None}, {"a": 1}) == "b"


def test_deployments_of_one_run_may_ask_for_nodes_of_their_own() -> None:
    asked = load_config([], ["generator.node_labels={pool: generator}", "learner.node_labels={pool: learner}"])
    assert shared_config(asked) == shared_config(Config())


def test_a_leading_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config([], ["model.path=~/models/a", "run.dir=~/runs", "data.dataset=jsonl", "data.path='~/q.jsonl'"])
    assert (config.model.path, str(config.run.dir), str(config.data.path)) == (
        "/home/ada/models/a",
        "/home/ada/runs",
        "/home/ada/q.jsonl",
    )


@pytest.mark.parametrize("key", ["loss", "advantage"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["={name: 'm:other'}"], {"name": "m:other"}),
        (["={anchor: proximal}"], {"anchor": "proximal"}),
        (["={}"], {}),
        (["={name: 'm:other'}", ".cap=2"], {"name": "m:other", "cap": 2}),
        ([".cap=2", "={name: 'm:other'}"], {"name": "m:other", "cap": 2}),
        (["={name: 'm:other', cap: 3}", "={anchor: proximal}"], {"anchor": "proximal"}),
        ([".temperature=0.7"], {"name": "m:ranked", "temperature": 0.7}),
        ([".name=m:other", ".cap=2"], {"name": "m:other", "cap": 2}),
        ([".cap=2", ".name=m:other"], {"name": "m:other", "cap": 2}),
        (["=m:other"], "m:other"),
    ],
)
def test_an_objective_and_an_estimator_are_replaced_as_a_whole_and_dotted_keys_change_single_options(
    tmp_path: Path, key: str, overrides: list[str], expected: object
) -> None:
    base = _write(tmp_path / "a.yaml", f"algorithm: {{{key}: {{name: 'm:ranked', temperature: 0.5}}}}\n")
    on_command_line = [f"algorithm.{key}{override}" for override in overrides]
    assert load_config([base], on_command_line).algorithm.model_dump()[key] == expected


@pytest.mark.parametrize(
    "layer",
    [
        {"algorithm": {"loss": {"anchor": "proximal"}}},
        {"algorithm.loss": {"anchor": "proximal"}},
        "algorithm: {loss: {anchor: proximal}}",
    ],
)
def test_the_axes_of_a_later_layer_are_not_mixed_with_those_of_an_earlier_one(
    tmp_path: Path, layer: dict[str, object] | str
) -> None:
    gates = {"algorithm": {"loss": {"gates": [{"stat": "k1", "by": "token", "lo": -1.0}]}}}
    later = _write(tmp_path / "b.yaml", layer) if isinstance(layer, str) else layer
    assert load_config([gates, later]).algorithm.loss == {"anchor": "proximal"}
    assert load_config([gates, {"algorithm.loss.anchor": "proximal"}]).algorithm.loss == {
        **gates["algorithm"]["loss"],
        "anchor": "proximal",
    }


def test_a_key_within_a_section_counts_more_than_the_section_wherever_it_stands() -> None:
    for overrides in (
        ["staleness={max_versions: 1}", "staleness.max_versions=3"],
        ["staleness.max_versions=3", "staleness={max_versions: 1}"],
    ):
        assert load_config([], overrides).staleness.max_versions == 3
