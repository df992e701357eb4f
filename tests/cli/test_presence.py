"""Parts that a configuration names and this machine lacks are reported before the start, for the roles that need
them."""

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import preflight
from asyncrl.cli.main import app
from asyncrl.cli.preflight import check_presence
from asyncrl.common.roles import Role
from asyncrl.config.load import config_origins, load_config
from asyncrl.data import light_tokenizer
from asyncrl.demo.directory import TINY_RECIPE
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def warnings(*overrides: str, roles: Collection[Role] = tuple(Role)) -> list[str]:
    origins = config_origins([QUICKSTART], overrides)
    return check_presence(load_config([QUICKSTART], overrides), roles=roles, origins=origins)


def missing(*overrides: str, roles: Collection[Role] = tuple(Role)) -> list[str]:
    try:
        warnings(*overrides, roles=roles)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def write_model(
    path: Path, *, vocabulary: int = 8, tokens: int = 8, added: int = 0, positions: int = 64, head_size: int = 64
) -> Path:
    """Writes the files of a model's directory that are read before a run starts."""
    path.mkdir(parents=True)
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": positions, "head_dim": head_size}
    (path / "config.json").write_text(json.dumps(sizes))
    vocab = {f"t{number}": number for number in range(tokens)}
    more = [{"id": tokens + number, "content": f"<a{number}>"} for number in range(added)]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": more}))
    (path / "model.safetensors").touch()
    return path


def test_the_quickstart_lacks_nothing() -> None:
    assert missing() == []


@pytest.mark.fault("F28")
def test_a_dataset_file_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    overrides = ("data.dataset=jsonl", f"data.path={file}")
    assert missing(*overrides) == [
        f"data.path = {file}: there is no such file; name a file with one JSON object in each line"
    ]
    file.touch()
    assert missing(*overrides) == []
    assert missing("data.dataset=jsonl", f"data.path={tmp_path}") != [], "a folder is not a file"


@pytest.mark.fault("F28")
def test_a_run_directory_that_cannot_be_written_is_refused_on_the_learner_s_machine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").touch()
    for folder, place, reason in [
        (file, file, "Not a directory"),  # a file in the place of run.dir
        (file / "below", file, "Not a directory"),
        (tmp_path / "runs", tmp_path / "runs" / "mine", "Not a directory"),  # a file in the place of the run
        (Path("/proc/runs"), Path("/proc"), "No such file or directory"),  # a folder in which no user can create files
    ]:
        overrides = (f"run.dir={folder}", "run.name=mine")
        assert missing(*overrides) == [
            f"run.dir = {folder}: the run's directory {folder / 'mine'} cannot be written ({place}: {reason}); set "
            "run.dir to a folder in which you can create files"
        ]
        assert missing(*overrides, roles=[Role.GENERATOR]) == []


@pytest.mark.fault("F28")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_directory_without_permission_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert f"({tmp_path}: Permission denied)" in missing(f"run.dir={tmp_path}/runs")[0]


def test_the_try_to_write_the_run_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert missing(f"run.dir={tmp_path}/new/runs") == missing(f"run.dir={tmp_path}/runs", "run.name=mine") == []
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "mine"]


@pytest.mark.fault("F28")
def test_a_model_s_directory_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert line.startswith(f"model.path = {model}: there is no such folder")
    write_model(model)
    assert missing("model.tiny=null", f"model.path={model}") == []
    assert missing("model.tiny=null", "model.path=Qwen/Qwen3-0.6B") == [], "this may be a model of the Hub"


def test_a_damaged_model_in_the_cache_of_the_hub_is_an_error_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    write_model(model)
    (model / "config.json").write_text('{"vocab')
    monkeypatch.setattr(light_tokenizer, "cached_files", lambda _: model)
    [line] = missing("model.tiny=null", "model.path=Qwen/Qwen3-0.6B")
    assert line.startswith("model.path = Qwen/Qwen3-0.6B: its config.json or tokenizer.json cannot be read (")


@pytest.mark.parametrize("path", ["models/llama-cat", "mine/llama-cat", "a/b/llama-cat"])
@pytest.mark.fault("F28")
@pytest.mark.usefixtures("in_tmp_path")
def test_a_typo_in_a_relative_path_is_a_folder_that_is_missed_and_the_nearest_is_named(path: str) -> None:
    near = Path(path).with_name("llama-chat")
    near.mkdir(parents=True)
    [line] = missing("model.tiny=null", f"model.path={path}")
    assert f"there is no such folder; did you mean {near}? If not, name a model's directory" in line


@pytest.mark.usefixtures("in_tmp_path")
def test_a_typo_in_the_name_of_a_parent_folder_is_found_and_the_first_remedy_is_the_folder_that_was_meant() -> None:
    Path("models/tiny-speller").mkdir(parents=True)
    Path("other").mkdir()
    [line] = missing("model.path=modles/tiny-spller")
    begin = (
        "model.path = modles/tiny-spller: there is no such folder; did you mean models/tiny-speller? If not, name an"
    )
    assert line.startswith(begin)
    [line] = missing("model.path=modles/quite-different")
    assert "did you mean" not in line


@pytest.mark.usefixtures("in_tmp_path")
def test_a_tiny_model_is_built_only_where_path_and_tiny_are_set_together(tmp_path: Path) -> None:
    assert missing() == [], "the quickstart's file sets both"
    for path in ("models/llama-cat", str(tmp_path / "other")):
        [line] = missing(f"model.path={path}")
        assert "no tiny model is built there, because model.path is set on the command line and model.tiny is" in line
        assert missing(f"model.path={path}", "model.tiny={}") == []
        assert missing(f"model.path={path}", "model.tiny.seed=3") == []
        (Path(path) / TINY_RECIPE).parent.mkdir(parents=True)
        (Path(path) / TINY_RECIPE).touch()
        assert missing(f"model.path={path}") == [], "asyncrl has built a tiny model there already"


@pytest.mark.parametrize("tiny", [[], ["model.tiny={}"], ["model.tiny=null"]], ids=["file's", "set again", "none"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
@pytest.mark.fault("F28")
@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_does_not_begin_with_what_its_own_start_moves_aside(tiny: list[str], there: bool, tmp_path: Path) -> None:
    model = tmp_path / "runs" / "quickstart" / "checkpoints" / "step-20" / "hf"
    if there:
        write_model(model)
    for path in (model, model.relative_to(tmp_path)):
        [line] = missing(*tiny, f"model.path={path}")
        assert line.startswith(f"model.path = {path}: is in the run's own directory runs/quickstart, which the start")
        other = missing(*tiny, f"model.path={path}", "run.name=second")
        assert (other == []) is there, "tiny models are not built in the directory of any run"


def test_a_model_that_is_there_is_used_as_it_is_and_a_note_says_so(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    [line] = warnings(f"model.path={model}")
    assert line == (
        f"model.path = {model} is a model that asyncrl did not build and is used as it is: model.tiny has no effect"
    )
    assert warnings(f"model.path={model}", "model.tiny=null") == []


@pytest.mark.parametrize(
    ("file", "named"),
    [("config.json", "config.json"), ("tokenizer.json", "a tokenizer"), ("model.safetensors", "weights")],
)
@pytest.mark.fault("F28")
def test_a_directory_without_a_part_of_a_model_is_refused_with_the_part(file: str, named: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / file).unlink()
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert f"is not a complete Hugging Face model, it lacks {named}" in line
    needs_no_weights = missing("model.tiny=null", f"model.path={model}", roles=[Role.GENERATOR]) == []
    assert needs_no_weights is (file == "model.safetensors"), "generators get the weights from the learner"


@pytest.mark.fault("F28")
def test_weights_that_their_index_names_and_that_are_not_there_are_missed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert "it lacks model-2.safetensors" in line


@pytest.mark.fault("F25")
def test_a_tokenizer_of_more_tokens_than_the_models_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocabulary=97, tokens=2000)
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert f"model.path = {model}: the tokenizer has 2000 tokens, but the model's vocabulary has only 97, " in line


@pytest.mark.fault("F25")
def test_an_added_token_beyond_the_vocabulary_is_a_note(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", vocabulary=8, tokens=8, added=1)
    [line] = warnings("model.tiny=null", f"model.path={model}")
    assert "added tokens beyond the model's vocabulary of 8, such as '<a0>'" in line


@pytest.mark.fault("F28")
def test_a_max_length_above_the_models_positions_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", positions=32)
    overrides = ("model.tiny=null", f"model.path={model}")
    assert missing(*overrides, "model.max_length=32") == []
    [line] = missing(*overrides, "model.max_length=33")
    assert line.startswith("model.max_length = 33: it must be at most 32, the max_position_embeddings of")
    (model / "config.json").write_text(
        json.dumps({"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4}})
    )
    assert missing(*overrides, "model.max_length=33") == [], "rope scaling extends max_position_embeddings"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_file_of_a_model_that_cannot_be_read_is_named(file: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / file).write_text('{"model": ')
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert "config.json or tokenizer.json cannot be read" in line


@pytest.mark.parametrize(
    ("key", "roles"),
    [
        ("data.dataset", [Role.LEARNER, Role.GENERATOR]),
        ("environment.name", [Role.LEARNER, Role.GENERATOR]),
        ("environment.reward", [Role.GENERATOR]),
        ("algorithm.loss", [Role.LEARNER]),
        ("algorithm.advantage", [Role.LEARNER]),
    ],
)
@pytest.mark.fault("F28")
def test_a_module_that_does_not_exist_is_missed_by_the_roles_that_import_it(key: str, roles: list[Role]) -> None:
    [problem] = missing(f"{key}=no_such_module:f")
    assert f"{key}: 'no_such_module:f' cannot be imported" in problem
    assert "PYTHONPATH" in problem
    assert [role for role in Role if missing(f"{key}=no_such_module:f", roles=[role])] == roles
    assert missing(f"{key}=pathlib:Path") == []


@pytest.mark.fault("F28")
def test_a_module_is_missed_where_an_advantage_has_options() -> None:
    [problem] = missing("algorithm.advantage={name: no_such_module:f, factor: 2}")
    assert "algorithm.advantage: 'no_such_module:f' cannot be imported" in problem
    assert missing("algorithm.advantage={name: group_norm, eps: 1e-4}") == []


@pytest.mark.parametrize("override", ["environment.name=no_such_module:f", "environment.options.task=spell"])
def test_an_environment_that_nobody_builds_is_not_missed(override: str) -> None:
    elsewhere = (override, "data.dataset=pathlib:Path")
    assert missing(*elsewhere) != []
    assert missing(*elsewhere, roles=[Role.LEARNER]) == [], (
        "the prompts come from another dataset, and only generators score"
    )
    assert missing(*elsewhere, "environment.reward=exact_match") == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.options.task=spell_backwards", "has no task 'spell_backwards'; did you mean 'spell_backward'?"),
        ("environment.options.task=null", "is missing; name one of reasoning-gym's"),
        ("environment.options.task=[3]", "has no task [3]"),
    ],
)
@pytest.mark.fault("F28")
def test_a_task_that_reasoning_gym_lacks_is_missed(override: str, says: str) -> None:
    [problem] = missing(override)
    assert problem.startswith("environment.options.task: ")
    assert says in problem


@pytest.mark.fault("F28")
def test_gpus_that_cannot_come_are_refused_where_ray_is_to_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(preflight, "_GPU_FILES", ("no-such-device",))
    assert missing() == []
    wanted = ("generator.gpus=1", "learner.gpus=0.5", "critic={gpus: 1}")
    refused = ["generator.gpus = 1", "learner.gpus = 0.5", "critic.gpus = 1"]
    assert [line.partition(":")[0] for line in missing(*wanted)] == refused
    assert missing(*wanted, "ray.address='10.0.0.7:6379'") == []
    assert missing(*wanted, roles=[Role.LEARNER]) == [], "a learner joins a cluster, whose machines may have GPUs"
    monkeypatch.setattr(preflight, "_GPU_FILES", ("null",))
    assert missing(*wanted) == [], "a container may have the device without nvidia-smi"
    monkeypatch.setattr(preflight, "_GPU_FILES", ("no-such-device",))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert missing(*wanted) == []
    monkeypatch.setattr(preflight, "_NVIDIA", "null")
    assert missing("generator.gpus=1") == []
    [line] = missing("generator.gpus=1", "generator.replicas=2", "learner.gpus=1")
    assert line.startswith(
        "generator.replicas × generator.gpus = 2 × 1 and learner.ranks × learner.gpus = 1 × 1: needs 3"
    )
    assert "this machine has 1" in line


def test_parts_of_engines_without_a_core_each_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    two_parts = "generator.tensor_parallel_size=2"
    assert warnings(two_parts, "generator.replicas=2") == []
    [warning] = warnings(two_parts, "generator.replicas=3")
    assert "2 × 3 on CPUs needs 6 cores, but this machine has 4" in warning
    assert warnings("generator.replicas=6") == [], "engines of one process do not busy-wait"
    assert warnings(two_parts, "generator.replicas=3", "ray.address='10.0.0.7:6379'") == []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert warnings(two_parts, "generator.replicas=3", "generator.gpus=2") == []


@pytest.mark.fault("F28")
def test_config_check_reports_what_is_missing_beside_the_rules_that_are_broken() -> None:
    mistakes = ["environment.reward=no_such_module:f", "environment.options.task=spell", "learner.ranks=5"]
    result = CliRunner().invoke(app, ["config", "check", "-c", str(QUICKSTART), *mistakes])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.fault("F28")
def test_a_head_size_that_vllm_does_not_support_on_cpus_is_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", head_size=16)
    [line] = missing(f"model.path={model}", "model.tiny=null", "model.max_length=16")
    assert f"model.path = {model}: its attention heads have 16 dimensions" in line
    assert "32, 64, 80" in line
    monkeypatch.setattr(preflight, "_GPU_FILES", ("null",))
    assert missing(f"model.path={model}", "model.tiny=null", "model.max_length=16", "generator.gpus=1") == []


@pytest.mark.parametrize(
    ("model_type", "changed", "problem"),
    [
        ("stablelm", {}, "set learner.batching to dynamic"),
        ("qwen3_moe", {}, "generate on a GPU"),
        ("qwen3", {"quantization_config": {"quant_method": "awq"}}, "in bfloat16"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "lower model.max_length"),
    ],
)
def test_a_family_that_would_be_wrong_is_refused(
    model_type: str, changed: dict[str, object], problem: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", positions=16)
    described = json.loads((model / "config.json").read_text()) | {"model_type": model_type} | changed
    (model / "config.json").write_text(json.dumps(described))
    lines = missing(f"model.path={model}", "model.tiny=null", "model.max_length=20")
    assert any(problem in line for line in lines)


def test_a_family_that_was_never_compared_is_a_warning(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    described = json.loads((model / "config.json").read_text()) | {"model_type": "zebra"}
    (model / "config.json").write_text(json.dumps(described))
    [line] = warnings(f"model.path={model}", "model.tiny=null")
    assert "models of the family zebra were never compared" in line


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_with_a_second_head_is_refused(tied: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    described = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (model / "config.json").write_text(json.dumps(described))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    entries = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * place, 4 * place + 4]}
        for place, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
    lines = missing(f"model.path={model}", "model.tiny=null")
    assert ["lm_head.weight and model.embed_tokens.weight with different numbers" in line for line in lines] == (
        [True] if tied else []
    )


def test_a_mirror_that_cannot_work_is_missed_where_the_learner_runs() -> None:
    overrides = ("run.mirror=s4://bucket/quickstart",)
    [line] = missing(*overrides)
    assert line.startswith("run.mirror = s4://bucket/quickstart: asyncrl has no mirrors at s4:// URLs")
    assert missing(*overrides, roles=(Role.GENERATOR,)) == []
    assert missing("run.mirror=file:///tmp/quickstart") == []
    [line] = missing("run.mirror=memory://quickstart")
    assert "a mirror in the memory of the run's process ends with it" in line


def test_the_directory_of_a_run_is_no_mirror_already_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    [line] = missing(f"run.mirror=file://{tmp_path}")
    assert "this is the directory of a run and no mirror" in line
    (tmp_path / "sent.json").write_text("{}")
    assert missing(f"run.mirror=file://{tmp_path}") == []
