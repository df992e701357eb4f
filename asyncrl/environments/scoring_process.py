"""Controls one scoring process from outside: starts it, sends requests, kills it with its descendants, replaces it.

The code blocks and is used by one thread. `scoring.py` gives it an asynchronous interface. `scoring_worker.py` is the
other end of the socket. Every wait ends at a deadline, or when the process ends.
"""

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from asyncrl.config.schema import EnvironmentSection
from asyncrl.environments.group_scoring import CANCEL_GRACE_S
from asyncrl.environments.reward_function import Form, caller, subject
from asyncrl.environments.reward_values import Unusable, check_names
from asyncrl.environments.scores import Score, Scores
from asyncrl.environments.scoring_child import Died, Late, ScoringChild
from asyncrl.environments.scoring_messages import (
    Components,
    Failure,
    Group,
    Outcome,
    Progress,
    Reply,
    Request,
    RewardFailure,
    Start,
    Started,
    encode,
)
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import ConfigError, DataError, InfraError

START_TIMEOUT_S = 120.0
"""Seconds in which a scoring process must become ready. Importing the environment takes seconds on a busy machine."""
_MAX_LEFT_BEHIND = 32
"""Descendants that reward code may leave running. A scoring process with more is replaced."""
GIVEN_UP_AFTER = 3
"""Processes in a row that reward code may end at the first completion of a request. After that, a group whose first
completion ends a process is not scored any further, so that a reward that always hangs costs each group one time limit
and not one for each completion."""
_AWAITED_GRACE_S = CANCEL_GRACE_S + 1.0
"""Seconds beyond the limit of an asynchronous reward. In this time its process reports that it cancelled the calls, or
that a call did not end."""

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY")
_KEPT_ENVIRONMENT = frozenset(
    (
        *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
        *(*_PROXIES, *map(str.lower, _PROXIES)),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
        *("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NODE_EXTRA_CA_CERTS"),
        *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE"),
        *("HF_MODULES_CACHE", "HF_XET_CACHE", "TRANSFORMERS_CACHE", "SENTENCE_TRANSFORMERS_HOME", "TORCH_HOME"),
        *("NLTK_DATA", "TIKTOKEN_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"),
    )
)
"""Variables that a scoring process inherits: general ones, proxies, certificates and caches. All others are withheld,
because they may be tokens or keys."""
_PASSWORD_IN_URL = re.compile(r"[^/@\s]*:[^/@\s]*@|//[^/@\s]+@")
"""A user's name or password in a URL, such as that of a proxy. Such a value is withheld, too."""

_log = logging.getLogger(__name__)


@dataclass
class ScoringProcess:
    """One scoring process and its replacements. One thread uses it at a time. `kill` may be called from any thread.

    Several objects may share the event `closing`. After it is set, none of them starts a process.
    """

    section: EnvironmentSection
    _: KW_ONLY
    secrets: Secrets
    output: Callable[[str], None]
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # keeps a process from being started or reaped while another thread kills it
        self._child: ScoringChild | None = None
        self._requests = 0
        self._fruitless = 0  # processes in a row that the reward has ended at the first completion of a request
        self._names: Set[str] = frozenset()  # the names of all components of rewards so far
        self.form = Form()
        """How the reward is called. It is valid after the first start of a process."""
        self.scored_s = 0.0
        """Seconds of scoring in the last call of `score`, as the process measured them: without the time that requests
        and replies take. A request in which the process was lost counts as a whole."""

    def start(self) -> None:
        """Makes sure that a process is alive and ready for requests. Starts or replaces it if needed.

        Raises ConfigError if the reward cannot be built. Raises InfraError with the reason `scorer_unavailable` if the
        process is not ready within `START_TIMEOUT_S`, and `scorer_closed` if `closing` is set.
        """
        if self.closing.is_set():
            raise closed()
        if self._child is not None:
            if self._child.alive():
                return
            self._replace("was found dead")
        child = self._spawned()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        withheld = tuple(os.environ.keys() - self._environment().keys())
        start = Start(section=self.section.model_dump_json(), withheld=withheld)
        try:
            child.send(encode(start), deadline_s=deadline_s)
            started = child.receive(Started, deadline=lambda: deadline_s)
        except (Died, Late) as error:
            status = self.discard()
            raise InfraError(
                f"a scoring process was not ready within {START_TIMEOUT_S:g} s: it {error} ({status}); look for "
                "its output in the reward log",
                reason="scorer_unavailable",
            ) from error
        if started.error is not None:
            self.discard()
            raise ConfigError(started.error)
        self.form = started.form

    def score(self, groups: Sequence[Group]) -> list[list[Score] | DataError]:
        """Returns the scores of each group, or the error of a group that cannot be sent.

        If a completion ends the process or exceeds its time limit, the scores that are known are kept, and a new
        process scores the other completions. If the reward has done so too often in a row (`gives_up`), the other
        completions of the group get the same error, or all others of an asynchronous reward. Raises the errors of
        `start`.
        """
        scores, self.scored_s = Scores(groups), 0.0
        while scores.open:
            self.start()
            requested = scores.request()
            self._requests += 1
            try:
                request = encode(Request(id=self._requests, groups=requested))
            except (TypeError, ValueError, RecursionError) as error:  # metadata that is not JSON, or a long message
                if len(groups) > 1:  # send the groups one by one to find the one that cannot be sent
                    alone = [(self.score([group]), self.scored_s) for group in groups]
                    self.scored_s = sum(seconds for _, seconds in alone)
                    return [result for results, _ in alone for result in results]
                return [
                    DataError(
                        f"the group cannot be sent to the scoring process: {error}; check the task's metadata and the "
                        "length of the completions",
                        reason="not_scorable",
                    )
                ]
            known = scores.rewards
            lost_at = self._lost_at(request, requested, scores)
            if scores.rewards > known or (lost_at is not None and lost_at > 0):
                self._fruitless = 0  # the reward can end: it did so for the completions before
            if lost_at is not None:
                self._fruitless += 1
                given_up = scores.left if self.form.asynchronous else scores.left_of_group(lost_at)
                if self.gives_up and given_up:
                    _log.warning(
                        "%d completions are not scored, because the reward has ended %d scoring processes in a row",
                        len(given_up),
                        self._fruitless,
                    )
                    scores.give_up(given_up)
        return list(scores.results())

    @property
    def gives_up(self) -> bool:
        """Whether the reward has ended so many processes in a row that no new one is started for the rest of a group.

        With `environment.on_error: fail`, one ended process is enough, because its group fails anyway.
        """
        return self._fruitless >= (1 if self.section.on_error == "fail" else GIVEN_UP_AFTER)

    def _lost_at(self, request: bytes, requested: Sequence[Group], scores: Scores) -> int | None:
        """Sends a request and keeps its scores. Returns the number of the completion at which the process was lost,
        because it exceeded a time limit, ended, or cannot go on. Returns None if the process goes on. The completions
        of a call that did not end get an error."""
        child, open_before = self._child, scores.open
        assert child is not None
        deadline, begun_s = self._deadline(requested, child.progress), time.monotonic()
        try:
            child.send(request, deadline_s=deadline())
            reply = self._reply(child, scores, deadline=deadline)
            while not reply.last:
                reply = self._reply(child, scores, deadline=deadline)
            if scores.open and not (reply.retire and scores.open < open_before):
                raise Died("sent no reward for some completions")
            self.scored_s += reply.scored_s
        except Late:
            self.scored_s += time.monotonic() - begun_s
            failed = self._being_scored(scores, child.progress)
            self._replace("exceeded its time limit")
            count = len(failed) if self.form.batched else 1
            what = self.form.overran(self.section.score_timeout_s, count)
            blocked = "; it blocked its event loop: use `await` for calls that take time, or remove `async`"
            self._fail(scores, failed, RewardFailure.TIMEOUT, what + (blocked if self.form.asynchronous else ""))
            return failed[0] if failed else 0
        except Died as error:
            self.scored_s += time.monotonic() - begun_s
            failed = self._being_scored(scores, child.progress)
            status = self._replace("died")
            if self.closing.is_set():
                raise closed() from error
            what = f"ended its scoring process: the process {error} ({status})"
            self._fail(scores, failed, RewardFailure.CRASHED, what)
            return failed[0] if failed else 0
        if reply.retire:
            self._replace(reply.retire)
            return scores.left[0] - 1 if scores.open else 0
        if len(child.descendants()) > _MAX_LEFT_BEHIND:
            self._replace(f"left more than {_MAX_LEFT_BEHIND} processes behind")
        return None

    def _reply(self, child: ScoringChild, scores: Scores, *, deadline: Callable[[], float]) -> Reply:
        """Receives the next reply to the last request, and keeps its scores."""
        reply = child.receive(Reply, deadline=deadline)
        if reply.id != self._requests or not scores.take((number, self._named(of)) for number, of in reply.outcomes):
            raise Died("sent a reply that does not belong to the request")
        return reply

    def _named(self, outcome: Outcome) -> Outcome:
        """Returns an outcome, or a failure if its components would be too many with those of all earlier rewards of
        this object. The scoring processes of a replica count their names separately."""
        if not isinstance(outcome, Components) or outcome.parts.keys() <= self._names:
            return outcome
        names = self._names | outcome.parts.keys()
        try:
            check_names(names)
        except Unusable as unusable:
            what = f"{subject(self.section)} {unusable}; the limit holds for all completions of a run together"
            return Failure(reason=unusable.reason, message=what)
        self._names = names
        return outcome

    def _being_scored(self, scores: Scores, progress: Progress) -> Sequence[int]:
        """Returns the numbers of the completions that the interrupted call scored: one, or those of a group that is
        scored in one call. If `progress` names no completion without a score, the call is not known. Then the result
        is all completions without a score, or only the first of them if the reward takes one after the other."""
        left = scores.left
        number, _ = progress.read()
        if number not in left:
            return left if self.form.asynchronous or self.form.batched else left[:1]
        return scores.left_of_group(number) if self.form.batched else [number]

    def _fail(self, scores: Scores, numbers: Sequence[int], reason: RewardFailure, what: str) -> None:
        message = f"{caller(self.section)} {what}"
        scores.fail(numbers, Failure(reason=reason, message=message, of_call=len(numbers) > 1))

    def _deadline(self, groups: Sequence[Group], progress: Progress) -> Callable[[], float]:
        """Returns a function that gives the deadline of a request that begins now.

        The calls of an asynchronous reward begin together. The deadline is the limit of the longest one and
        `_AWAITED_GRACE_S` more. Other calls are made one after the other, and the deadline moves with the progress:
        each call has the limit of the longest one from its beginning. The deadline never exceeds the limits of all
        calls together.
        """
        progress.begin(0)
        begun_s = time.monotonic()
        sizes = [size for group in groups for size in self.form.calls(len(group.completions))]
        limits_s = [self.form.limit_s(self.section.score_timeout_s, size) for size in sizes]
        longest_s, latest_s = max(limits_s), begun_s + sum(limits_s)
        if self.form.asynchronous:
            return lambda: begun_s + longest_s + _AWAITED_GRACE_S
        return lambda: min(progress.read()[1] + longest_s, latest_s)

    def kill(self) -> None:
        """Ends the process and its descendants. The thread that uses the process then finds it dead."""
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def discard(self) -> str:
        """Kills the process and closes its socket, pipe and shared memory. Returns how it ended."""
        self.kill()
        child, self._child = self._child, None
        if child is None:
            return "not started"
        child.close()
        return child.ending()

    def _replace(self, why: str) -> str:
        status = self.discard()
        if not self.closing.is_set():
            _log.warning("a scoring process is replaced, because it %s (%s)", why, status)
        return status

    def _spawned(self) -> ScoringChild:
        with self._lock:
            if self.closing.is_set():
                raise closed()
            self._child = ScoringChild(environment=self._environment(), secrets=self.secrets, output=self.output)
            return self._child

    def _environment(self) -> dict[str, str]:
        """Returns the environment of a scoring process: a few general variables, the secrets of the config but no other
        keys, the module search path of this process, and one thread for each numeric library."""
        kept = {name: value for name, value in os.environ.items() if _kept(name, value)}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        return kept | threads | self.secrets.environment | {"PYTHONPATH": search_path, "PYTHONHASHSEED": "0"}


@contextlib.contextmanager
def started(
    section: EnvironmentSection, *, secrets: Secrets, output: Callable[[str], None]
) -> Iterator[ScoringProcess]:
    """Yields a scoring process that is ready for calls of this thread. It ends with the block. Raises the errors of
    `ScoringProcess.start`."""
    process = ScoringProcess(section, secrets=secrets, output=output)
    try:
        process.start()
        yield process
    finally:
        process.discard()


def _kept(name: str, value: str) -> bool:
    return name in _KEPT_ENVIRONMENT and not _PASSWORD_IN_URL.search(value)


def closed() -> InfraError:
    """Returns the error of every score after `Scorer.close`."""
    return InfraError("the scorer has been closed and scores no more groups", reason="scorer_closed")
