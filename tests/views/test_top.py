"""`asyncrl top` with real endpoints: present values of gauges, and speeds and shares since the last scrapes."""

import doctest
import io
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.metrics.catalogue import GENERATOR_STATES, LEARNER_STATES
from asyncrl.metrics.discovery import targets_of, write_targets
from asyncrl.metrics.recorders import BufferMetrics, GeneratorMetrics, LearnerMetrics, ProcessMetrics
from asyncrl.metrics.scrape import Scrape
from asyncrl.metrics.server import MetricsServer
from asyncrl.views import live, top
from asyncrl.views.live import LiveView, plain_line, render

pytestmark = pytest.mark.slow


def named(run: str) -> Config:
    return Config.model_validate({"run": {"name": run}})


class Run:
    """A learner, two generators and a buffer with real endpoints, as a run directory lists them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.learner, self.buffer = LearnerMetrics(), BufferMetrics()
        self.generators = [GeneratorMetrics(environment="math") for _ in range(2)]
        self.learner_seconds = dict.fromkeys(LEARNER_STATES, 0.0)
        self.generator_seconds = dict.fromkeys(GENERATOR_STATES, 0.0)
        self.learner.states_from(lambda: self.learner_seconds)
        for generator in self.generators:
            generator.states_from(lambda: self.generator_seconds)
        processes = {"learner": self.learner, "buffer": self.buffer} | {
            f"generator-{index}": generator for index, generator in enumerate(self.generators)
        }
        self._stack = stack
        self.servers: dict[str, MetricsServer] = {}
        for name, metrics in processes.items():
            self.serve(name, metrics)
            metrics.run_info(named("r"))
            metrics.heartbeat(unix_time_s=1.0)
        self.buffer.limits(max_staleness_versions=3, capacity_groups=48, capacity_bytes=2**20)

    def serve(self, name: str, metrics: ProcessMetrics) -> None:
        """Starts the endpoint of a process, or replaces the endpoint of that name."""
        server = MetricsServer(metrics.registry, host="127.0.0.1", port=0)
        self.servers[name] = self._stack.enter_context(server)
        targets = targets_of({name: server.address for name, server in self.servers.items()})
        write_targets(self.path / "metrics" / "targets.json", run="r", targets=targets)

    def train(self, version: int, *, reward: float) -> None:
        """Records one step: 3 s of waiting and 1 s of work, and two samples of 100 tokens, one of them two versions
        old."""
        self.learner_seconds["waiting_for_groups"] += 3.0
        self.learner_seconds["forward_backward"] += 1.0
        self.generator_seconds["generating"] += 4.0
        self.learner.versions(learner=version, published=version)
        self.learner.step(outcome="trained", duration_s=4.0, tokens=200)
        self.learner._instruments.set("asyncrl_learner_reward_mean", reward)
        self.learner._instruments.set("asyncrl_learner_ess_ratio", 0.75)
        self.learner.staleness(groups={}, tokens={0: 100, 2: 100}, in_flight={}, in_buffer={})
        for index, generator in enumerate(self.generators):
            generator.samples(1, outcome="accepted")
            generator.samples(5, outcome="late")
            generator.policy_version(version - index)
        self.buffer.fill(reserved=8, ready=4, leased=4, bytes=100, oldest_group_age_s=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path / "r", stack)


def looks(run: Run, *steps: tuple[int, float]) -> list[LiveView]:
    """Returns one view after each of the steps (version, reward)."""
    todo = iter(steps)

    def sleep(_: float) -> None:
        version, reward = next(todo)
        run.train(version, reward=reward)

    watching = top.watch(run.path, every_s=1.0, sleep=sleep)
    return [next(watching) for _ in steps]


def test_doctests() -> None:
    assert doctest.testmod(top).failed == 0
    assert doctest.testmod(live).failed == 0


def test_levels_are_of_now_and_speeds_of_what_happened_between_two_looks(run: Run) -> None:
    run.train(1, reward=0.1)
    _, view = looks(run, (2, 0.25), (3, 0.5))
    assert view.step == 3
    assert view.rewards == [0.25, 0.5]
    assert view.ess_ratio == 0.75
    assert (view.staleness_limit, view.oldest_token_versions) == (3, 2)
    assert view.buffer_groups == {"reserved": 8, "ready": 4, "leased": 4}
    assert view.buffer_capacity_groups == 48
    assert (view.published_version, view.replica_versions) == (3, {"generator-0": 3, "generator-1": 2})
    assert view.learner_shares is not None
    assert view.generator_shares is not None
    assert view.learner_shares["waiting_for_groups"] == 0.75
    assert view.generator_shares["generating"] == 1.0
    assert view.tokens_per_s is not None
    assert view.samples_per_s is not None
    assert view.tokens_per_s == pytest.approx(100 * view.samples_per_s), "200 tokens and 2 accepted samples"


def test_between_two_looks_without_a_step_nothing_is_fast_or_old(run: Run) -> None:
    run.train(1, reward=0.1)
    watching = top.watch(run.path, every_s=1.0, sleep=lambda _: None)
    view = next(watching)
    assert view.tokens_per_s == 0
    assert view.oldest_token_versions is None
    assert view.learner_shares is None


def test_who_does_not_answer_is_named_and_the_rest_is_shown(run: Run) -> None:
    run.servers["generator-1"].close()
    [view] = looks(run, (1, 0.5))
    assert view.phase == "1 learner, 1 generator, 1 buffer; no answer from generator-1"
    assert view.replica_versions == {"generator-0": 1}


def test_a_learner_that_was_replaced_counts_from_zero(run: Run) -> None:
    """The counters of the new process start at 0, and those of the old process do not count."""
    run.learner_seconds["waiting_for_groups"] = 100.0
    run.learner.step(outcome="trained", duration_s=1.0, tokens=1000)

    def replaced(_: float) -> None:
        run.servers["learner"].close()
        learner = LearnerMetrics()
        learner.run_info(named("r"))
        learner.states_from(lambda: {"waiting_for_groups": 6.0, "optimizer": 2.0})
        learner.step(outcome="trained", duration_s=1.0, tokens=50)
        run.serve("learner", learner)

    view = next(top.watch(run.path, every_s=1.0, sleep=replaced))
    assert view.learner_shares is not None
    assert (view.learner_shares["waiting_for_groups"], view.learner_shares["optimizer"]) == (0.75, 0.25)
    assert view.tokens_per_s is not None
    assert view.tokens_per_s > 0


@pytest.mark.parametrize(("window_s", "waited"), [(1000.0, 0.5), (0.0, 0.0)])
def test_shares_are_of_a_window_of_looks_and_not_of_the_last_one_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, window_s: float, waited: float
) -> None:
    monkeypatch.setattr(top, "WINDOW_S", window_s)
    stages = iter(["waiting_for_groups", "optimizer"])

    def sleep(_: float) -> None:
        run.learner_seconds[next(stages)] += 2.0

    watching = top.watch(run.path, every_s=1.0, sleep=sleep)
    _, view = next(watching), next(watching)
    assert view.learner_shares is not None
    assert view.learner_shares["waiting_for_groups"] == waited


def test_the_window_is_half_a_minute_of_looks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrapes are 10 s apart, so a view covers the last three intervals and no earlier ones."""
    look, looked = top._look, iter(range(100))
    monkeypatch.setattr(top, "_look", lambda path: replace(look(path), at_s=10.0 * next(looked)))
    stages = iter(["checkpoint", "waiting_for_groups", "optimizer", "optimizer", "publish"])

    def sleep(_: float) -> None:
        run.learner_seconds[next(stages)] += 10.0

    watching = top.watch(run.path, every_s=10.0, sleep=sleep)
    shares = [next(watching).learner_shares or {} for _ in range(5)]
    thirds = [{state: round(3 * share) for state, share in of.items() if share} for of in shares[2:]]
    assert thirds == [
        {"checkpoint": 1, "waiting_for_groups": 1, "optimizer": 1},
        {"waiting_for_groups": 1, "optimizer": 2},
        {"optimizer": 2, "publish": 1},
    ]


def test_before_the_first_step_there_is_no_reward_and_the_panel_says_who_is_there(run: Run) -> None:
    view = next(top.watch(run.path, every_s=1.0, sleep=lambda _: None))
    assert (view.step, view.rewards, view.heldout) == (0, [], [])
    assert view.phase == "1 learner, 2 generators, 1 buffer"


class Said:
    """The text that an endpoint answers with. A test may change it between two scrapes."""

    def __init__(self, run_dir: Path, address: str) -> None:
        self.run_dir = run_dir
        self.text = ""
        targets = targets_of({"learner": address})
        write_targets(run_dir / "metrics" / "targets.json", run=run_dir.name, targets=targets)


@contextmanager
def speaking(run_dir: Path) -> Iterator[Said]:
    """Runs a run with one endpoint, whose answers the test sets."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = said.text.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        said = Said(run_dir, f"127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield said
        server.shutdown()
        thread.join(60)


HEARD = 'asyncrl_run_info{run_name="r"} 1\nasyncrl_heartbeat_timestamp_seconds 1\n'
STEP_3 = f"{HEARD}asyncrl_learner_policy_version 3\n"
LEARNER, GENERATOR = top.LEARNER_SECONDS, top.GENERATOR_SECONDS
NOT_OURS = ("<html>hello</html>\n", "", "foo 1\n")
BAD = {
    "a version that is infinite": f"{HEARD}asyncrl_learner_policy_version +Inf\n",
    "a version below 0": f"{HEARD}asyncrl_learner_policy_version -5\nasyncrl_learner_reward_mean 0.5\n",
    "groups without end": f'{STEP_3}asyncrl_buffer_groups{{state="ready"}} +Inf\n',
    "a bucket up to a word": f'{STEP_3}asyncrl_token_staleness_versions_bucket{{le="abc"}} 1\n',
    "time without end": f'{STEP_3}{LEARNER}{{state="optimizer"}} +Inf\n{GENERATOR}{{state="idle"}} 4\n',
    "parts above the whole": f'{STEP_3}{LEARNER}{{state="waiting_for_groups"}} 5\n'
    f'{LEARNER}{{state="optimizer"}} -4\n{GENERATOR}{{state="idle"}} 4\n',
    "a reward that is infinite": f"{STEP_3}asyncrl_learner_reward_mean +Inf\n",
    "a start that never was": f"{STEP_3}process_start_time_seconds -Inf\n",
    "a start that never will be": f"{STEP_3}process_start_time_seconds +Inf\n",
    "a page": NOT_OURS[0],
    "nothing": NOT_OURS[1],
    "somebody else's metrics": NOT_OURS[2],
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_whatever_an_endpoint_says_ends_in_a_panel_or_an_error_in_words(tmp_path: Path, text: str) -> None:
    with speaking(tmp_path / "r") as said:
        said.text = text
        result = CliRunner().invoke(app, ["top", str(said.run_dir), "--once", "--every", "0.2"])
    if text in NOT_OURS:
        assert result.exit_code == 1
        assert "error: none of the 1 endpoints" in result.output
        return
    assert result.exit_code == 0, result.exc_info
    assert "of the time" not in result.output
    assert not re.search(r"\b(nan|inf)\b|-\d|[2-9]\d\d ?%", result.output), result.output


SHOWN = (
    *("asyncrl_learner_policy_version", "asyncrl_published_policy_version", "asyncrl_generator_policy_version"),
    *("asyncrl_staleness_limit_versions", "asyncrl_buffer_capacity_groups", 'asyncrl_buffer_groups{state="ready"}'),
    *("asyncrl_learner_ess_ratio", "asyncrl_learner_tokens_total", "process_start_time_seconds"),
    *('asyncrl_generator_samples_total{outcome="accepted"}', 'asyncrl_token_staleness_versions_bucket{le="2"}'),
    *(f'{LEARNER}{{state="waiting_for_groups"}}', f'{GENERATOR}{{state="generating"}}'),
)
REWARDS = ("asyncrl_learner_reward_mean", "asyncrl_learner_heldout_reward_mean")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1.7e308", "-1.7e308", "1e29", "-5"])
@pytest.mark.parametrize("name", [*SHOWN, *REWARDS])
def test_no_number_of_an_endpoint_makes_the_view_fail_or_say_what_cannot_be(
    tmp_path: Path, name: str, value: str
) -> None:
    """Only one value is bad; the other values must still be shown."""
    with speaking(tmp_path / "r") as said:
        good = dict.fromkeys((*SHOWN, *REWARDS), "1") | {"asyncrl_learner_policy_version": "3"}
        watching = top.watch(said.run_dir, every_s=1.0, sleep=tell(said, HEARD, good | {name: value}))
        view = next(watching)
    text = text_of(view)
    assert not re.search(r"\b(nan|inf)\b", text), text
    if name not in REWARDS:
        assert not re.search(r"-\d|\d{20}|[2-9]\d\d ?%", text), text
    if name != "asyncrl_learner_policy_version":
        assert view.step == 3
    if name == "process_start_time_seconds" and value != "1e29":  # 1e29 is a time in the future
        assert view.elapsed_s is None


def tell(said: Said, head: str, values: dict[str, str]) -> Callable[[float], None]:
    """Makes the endpoint answer with `head` first, and with `head` and `values` from the second scrape on."""
    said.text = head

    def later(_: float) -> None:
        said.text = head + "".join(f"{name} {value}\n" for name, value in values.items())

    return later


def text_of(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return f"{console.file.getvalue()}\n{plain_line(view)}"


def test_what_is_not_known_is_not_shown_as_0(tmp_path: Path) -> None:
    """The limit and the start of the process are unknown, so the view must not show them."""
    with speaking(tmp_path / "r") as said:
        values = {"asyncrl_learner_policy_version": "3", 'asyncrl_token_staleness_versions_bucket{le="2"}': "1"}
        unknown = dict.fromkeys(("asyncrl_staleness_limit_versions", "process_start_time_seconds"), "NaN")
        view = next(top.watch(said.run_dir, every_s=1.0, sleep=tell(said, HEARD, values | unknown)))
    assert (view.staleness_limit, view.elapsed_s, view.rewards) == (None, None, [])
    assert "limit" not in text_of(view)
    assert "0.0 s" not in text_of(view)
    assert "staleness 2," not in plain_line(view)
    assert plain_line(view).startswith("step 3, reward –, staleness 2")


def learner_of(run: str, *, step: int) -> LearnerMetrics:
    metrics = LearnerMetrics()
    metrics.run_info(named(run))
    metrics.heartbeat(unix_time_s=1.0)
    metrics.versions(learner=step, published=step)
    return metrics


def test_a_dead_run_does_not_show_the_numbers_of_the_run_that_has_its_port_now(run: Run) -> None:
    """A panel with the other run's numbers would look like a panel of this run."""
    for name in ("buffer", "generator-0", "generator-1"):
        run.servers[name].close()
    run.serve("learner", learner_of("b", step=777))
    address = run.servers["learner"].address
    result = CliRunner().invoke(app, ["top", str(run.path), "--once", "--every", "0.2"])
    assert result.exit_code == 1
    assert "none of the 4 endpoints" in result.output
    assert f"{address} belongs to run b now" in result.output
    assert "published" not in result.output


def test_a_port_that_another_run_has_now_is_said_and_the_rest_is_shown(run: Run) -> None:
    run.serve("generator-1", learner_of("b", step=777))
    [view] = looks(run, (1, 0.5))
    stranger = run.servers["generator-1"].address
    assert view.phase == f"1 learner, 1 generator, 1 buffer; {stranger} belongs to run b now"
    assert view.replica_versions == {"generator-0": 1}


def test_a_directory_that_was_moved_aside_is_no_live_run(run: Run) -> None:
    """The next run of its name may use the same ports, so the old targets may reach the new run's endpoints."""
    for name in ("buffer", "generator-0", "generator-1"):
        run.servers[name].close()
    aside = run.path.rename(run.path.with_name("r.1"))
    with pytest.raises(RunError, match="belongs to run r now"):
        next(top.watch(aside, every_s=1.0, sleep=lambda _: None))


def test_a_run_that_has_ended_is_an_error_and_not_an_empty_screen(run: Run, tmp_path: Path) -> None:
    for server in run.servers.values():
        server.close()
    with pytest.raises(RunError, match="none of the 4 endpoints"):
        next(top.watch(run.path, every_s=1.0, sleep=lambda _: None))
    with pytest.raises(RunError, match="No such file"):
        next(top.watch(tmp_path / "none", every_s=1.0, sleep=lambda _: None))


@pytest.mark.parametrize("once", [[], ["--once"]], ids=["live", "once"])
@pytest.mark.parametrize("looks_before", [0, 1, 2])
def test_a_run_that_lists_no_endpoint_any_more_has_ended_which_is_no_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, looks_before: int, once: list[str]
) -> None:
    look, looked = top._look, iter(range(100))

    def last_looks(path: Path) -> Scrape:
        if next(looked) == looks_before:
            write_targets(path / "metrics" / "targets.json", run="r", targets=[])
        return look(path)

    monkeypatch.setattr(top, "_look", last_looks)
    result = CliRunner().invoke(app, ["top", str(run.path), "--every", "0.2", *once])
    assert result.exit_code == 0, result.output
    said = "run r has ended" in result.output.replace("\n", " ")
    assert said is not bool(once and looks_before == 2), "with --once, two scrapes are enough for a view"


def test_once_prints_the_panel_also_where_there_is_no_terminal(run: Run) -> None:
    run.train(7, reward=0.5)
    result = CliRunner().invoke(app, ["top", str(run.path), "--once", "--every", "0.2"])
    assert result.exit_code == 0, result.output
    assert "published 7; 1 replica at 7, 1 at 6" in result.output
    assert "16 of 48 slots" in result.output


def test_a_run_without_unequal_rewards_is_warned_of_over_the_steps_that_were_seen(run: Run) -> None:
    def equal(ratio: float) -> None:
        run.learner._instruments.set("asyncrl_learner_zero_variance_ratio", ratio)
        run.learner._instruments.set("asyncrl_learner_all_right_ratio", 0.0)

    equal(1.0)
    run.train(1, reward=0.0)
    first, second = looks(run, (2, 0.0), (3, 0.0))
    assert first.headline is not None
    assert second.headline is not None
    assert "In 100 % of the groups of the last step" in first.headline.sentence
    assert "In 100 % of the groups of the last 2 steps" in second.headline.sentence
    equal(0.25)
    (third,) = looks(run, (4, 0.0))
    assert third.headline is not None
    assert not third.headline.warns


def test_failed_groups_are_those_of_the_time_between_two_looks(run: Run) -> None:
    def ended(*, trained: int, failed: int) -> None:
        groups = {"trained": trained, "failed": failed, "reserved": 500}
        run.buffer.ledger(issued_groups=sum(groups.values()), groups=groups, tokens={})

    ended(trained=90, failed=100)
    for generator in run.generators:
        generator.rollout_failed(failure_class="data", reason="reward_raised")
    watching = top.watch(run.path, every_s=1.0, sleep=lambda _: ended(trained=180, failed=110))
    view = next(watching)
    assert view.headline is not None
    assert view.headline.sentence.startswith("10 % of the groups failed and were not trained: fix the cause")
