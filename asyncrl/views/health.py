"""The health notes of a run: what is wrong with its training, since when, why, and where to look.

`RULES` has a rule for each subject (`Concern`) but the bottleneck, the most urgent first. A rule has a function that
finds the fault in the records, its limits with a reason each, the likely causes in their order, a command that shows
more, and the faults that explain it. `notes_of` applies all rules. A fault that another one explains gets no note of
its own: the note of the explaining fault lists it.

All views, the summary and the metrics show the notes of `notes_of`, and the headline of a run is its first note, if it
has one. The notes depend on the records, the setting and the counted failures of the run only, so a running process and
a reader of its directory find the same. Only the live view counts failed groups of the last steps alone.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from asyncrl.common.concern import Concern
from asyncrl.learner.records import Note
from asyncrl.views import health_finds as find
from asyncrl.views.evidence import RECENT_STEPS, Evidence
from asyncrl.views.health_finds import Finding, Limit


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause with the setting to change. A note names it if `when` is true for the run. `condition` says in
    words when that is; empty if always. In `text`, `{tags}` stands for the tags that rewards do not see."""

    text: str
    condition: str = ""
    when: Callable[[Evidence], bool] = lambda _: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a note is found, and what it says. `shows` says in words when the note appears. `look` is a command, in which
    `{run}` and `{step}` stand for the run and the first step of the note (for a note without a step, the run's last
    step). `follows_from` names faults that explain this one."""

    concern: Concern
    shows: str
    finds: Callable[[Evidence], Finding | None]
    limits: Sequence[Limit] = ()
    causes: Sequence[Cause]
    look: str
    follows_from: Sequence[Concern] = ()


LOG = "tail -n 50 {run}/logs/learner-*.log"
SAMPLES = "asyncrl samples {run} --worst"
THEN = "asyncrl samples {run} --step {step}"
REPORT = "asyncrl report {run}"


def _learned(seen: Evidence) -> bool:
    return seen.at_highest_reward is not None


def _not_learned(seen: Evidence) -> bool:
    return not _learned(seen)


def _tags_hidden(seen: Evidence) -> bool:
    return bool(seen.setting.hidden_tags) and not _learned(seen)


def _chat_off(seen: Evidence) -> bool:
    return seen.setting.chat_off


def _chat_on(seen: Evidence) -> bool:
    return not seen.setting.chat_off


def _cut_later(seen: Evidence) -> bool:
    return not find.cut_at_first(seen)


def _reward_fails(seen: Evidence) -> bool:
    """Whether all known failures are of the reward. If few groups failed, the failures are of samples of trained
    groups, which fail only by their reward. If many failed and their reasons are not known, returns False."""
    if find.failed_share(seen.groups) <= find.MANY_FAILURES.value:
        return True
    return bool(seen.failures) and all(reason.startswith("reward_") for reason in seen.failures)


def _no_step_skipped(seen: Evidence) -> bool:
    return all(record.trained for record in seen.steps[-RECENT_STEPS:])


def _coarse(seen: Evidence) -> bool:
    return seen.setting.dtype != "float32"


def _entropy_falls(seen: Evidence) -> bool:
    return find.falls(seen, attrgetter("entropy_nats"))


def _entropy_rises(seen: Evidence) -> bool:
    return not _entropy_falls(seen)


LOWER_RATE = Cause("updates are too large: lower learner.optimizer.learning_rate")
TOO_STALE = Cause("the data is too old: lower staleness.max_versions")
TEMPLATE = Cause(
    "the model gets no chat template, so it does not know where an answer ends: set data.chat=auto",
    "if data.chat is off",
    _chat_off,
)
HIDDEN_TAGS = Cause(
    "if the reward looks for {tags}: the text that it gets never has them; see environment.special_tokens and "
    "task.generation_prompt",
    "if the tokenizer removes tags",
    _tags_hidden,
)
HACKED = Cause("the reward pays for something else than right answers: change environment.rewards or their weights")

RULES: tuple[Rule, ...] = (
    Rule(
        concern=Concern.NOTHING_TRAINED,
        shows="every step was skipped",
        finds=find.nothing_trained,
        causes=(
            LOWER_RATE,
            Cause(
                "the engines' numbers are not finite either: set model.dtype=float32",
                "if model.dtype is not float32",
                _coarse,
            ),
        ),
        look=LOG,
    ),
    Rule(
        concern=Concern.NOT_VERIFIED,
        shows="the witness found an update that is not the configured one",
        finds=find.not_verified,
        limits=(find.ACCEPTED,),
        causes=(
            Cause("an error in the learner's log says what differs; witness.on_failure says whether training goes on"),
        ),
        look=LOG,
    ),
    Rule(
        concern=Concern.CUT,
        shows="answers end at their length limit",
        finds=find.cut,
        limits=(find.MOSTLY_CUT, find.LEAST_STEPS),
        causes=(
            TEMPLATE,
            Cause(
                "the answers became longer: penalise long ones (algorithm.overlong=penalise), or lower "
                "learner.optimizer.learning_rate",
                "if the first step's answers were not cut",
                _cut_later,
            ),
            Cause("the limit is too low for the task: raise generator.max_completion_tokens and model.max_length"),
            Cause(
                "the model does not end its answers with a token at which engines stop: use the chat template with "
                "which it was trained (data.chat), or set generator.stop",
                "if data.chat is not off",
                _chat_on,
            ),
        ),
        look=SAMPLES,
    ),
    Rule(
        concern=Concern.NO_TOOL_CALLS,
        shows="a model with tools calls none",
        finds=find.no_tool_calls,
        limits=(find.NO_CALLS, find.LEAST_STEPS),
        causes=(
            Cause("the calls are not read: set generator.tool_parser to the format of this model"),
            TEMPLATE,
            Cause("the prompt does not ask for calls: describe them in data.system_prompt, or pay for the first ones"),
        ),
        look=SAMPLES,
        follows_from=(Concern.CUT,),
    ),
    Rule(
        concern=Concern.ONE_TURN,
        shows="episodes of several turns have one",
        finds=find.one_turn,
        limits=(find.ONE, find.LEAST_STEPS),
        causes=(
            Cause("the model answers at once: ask for steps in data.system_prompt, or pay for them in the reward"),
            Cause("the agent ends early: look for an error in its code"),
            Cause("one turn is what you want: set environment.max_turns=1, which ends this note"),
        ),
        look=SAMPLES,
        follows_from=(Concern.CUT, Concern.NO_TOOL_CALLS),
    ),
    Rule(
        concern=Concern.ZERO_REWARDS,
        shows="all rewards are the same number, which is not above 0",
        finds=find.zero_rewards,
        limits=(find.LEAST_STEPS, find.LEAST_SAMPLES, find.MANY_STEPS),
        causes=(
            HIDDEN_TAGS,
            TEMPLATE,
            Cause("the reward does not find the answers in the text: correct environment.reward, or the prompt"),
            Cause("the questions are too hard: use easier ones (data), or a reward with more steps"),
        ),
        look=SAMPLES,
        follows_from=(Concern.CUT, Concern.NO_TOOL_CALLS, Concern.ONE_TURN),
    ),
    Rule(
        concern=Concern.NO_GRADIENT,
        shows="the rewards of a group are equal in almost all groups",
        finds=find.no_gradient,
        limits=(find.MOSTLY_EQUAL, find.LEAST_STEPS, find.LEAST_SAMPLES, find.MANY_STEPS),
        causes=(
            Cause(
                "if a reward cannot be higher, there is little left to learn: use harder questions; otherwise use "
                "easier ones",
                "if the mean reward is near the highest one",
                _learned,
            ),
            Cause(
                "the questions are too hard: use easier ones (harder ones if the answers are right)",
                "otherwise",
                _not_learned,
            ),
            HIDDEN_TAGS,
            Cause("the reward has too few values: use a denser one", "otherwise", _not_learned),
            Cause("groups are too small: raise learner.group_size", "otherwise", _not_learned),
        ),
        look=SAMPLES,
        follows_from=(Concern.CUT, Concern.NO_TOOL_CALLS, Concern.ZERO_REWARDS, Concern.ENTROPY, Concern.LENGTH),
    ),
    Rule(
        concern=Concern.FAILURES,
        shows="groups, or rewards of trained samples, failed",
        finds=find.failures,
        limits=(find.MANY_FAILURES,),
        causes=(
            Cause("fix the reward (environment.reward)", "if all known failures are of the reward", _reward_fails),
            Cause("fix the cause", "otherwise", lambda seen: not _reward_fails(seen)),
        ),
        look=LOG,
    ),
    Rule(
        concern=Concern.PARITY,
        shows="the log-probs of engines and learner differ",
        finds=find.parity,
        limits=(find.ACCEPTED,),
        causes=(
            Cause("the engines compute with other numbers: check model.dtype"),
            Cause("old entries of the KV cache are used: set weights.kv_cache=recompute"),
        ),
        look=LOG,
    ),
    Rule(
        concern=Concern.UNCHANGED,
        shows="updates do not change the weights, or half of the last steps were skipped",
        finds=find.unchanged,
        limits=(find.FEW_BITS, find.TINY_RATE, find.MANY_SKIPPED, find.LEAST_STEPS),
        causes=(
            Cause(
                "the changes are smaller than the precision of the weights: raise learner.optimizer.learning_rate",
                "if no step was skipped",
                _no_step_skipped,
            ),
            Cause(
                "model.dtype is too coarse for the rate: set model.dtype=float32, or raise weights.publish_every_steps",
                "if no step was skipped and model.dtype is not float32",
                lambda seen: _no_step_skipped(seen) and _coarse(seen),
            ),
            Cause(
                "the updates are too large: lower learner.optimizer.learning_rate and learner.optimizer.max_grad_norm",
                "if steps were skipped",
                lambda seen: not _no_step_skipped(seen),
            ),
        ),
        look=REPORT,
        follows_from=(Concern.NOTHING_TRAINED, Concern.CUT, Concern.ZERO_REWARDS, Concern.NO_GRADIENT),
    ),
    Rule(
        concern=Concern.COMPONENTS,
        shows="a component of the reward falls while another one rises",
        finds=find.components,
        limits=(find.FALLEN, find.CLEAR_PART),
        causes=(
            Cause(
                "if the falling component is what you want: the rising one is easier to get, so lower its weight in "
                "environment.rewards"
            ),
            Cause(
                "the rising one is paid for wrong answers too: pay it for right answers only, in one reward of your own"
            ),
        ),
        look=THEN,
    ),
    Rule(
        concern=Concern.ENTROPY,
        shows="the entropy is far from its first values, and the rewards are not higher",
        finds=find.entropy,
        limits=(find.LOST_ENTROPY, find.GROWN_ENTROPY, find.LEAST_GAIN, find.CLEAR),
        causes=(
            LOWER_RATE,
            Cause(
                "nothing keeps the policy from being certain: raise the upper clip (algorithm.overrides, "
                "surrogate.hi), or generator.temperature",
                "if it fell",
                _entropy_falls,
            ),
            Cause(
                "wrong answers are pushed down without a limit: add a clip or a gate (algorithm.loss)",
                "if it rose",
                _entropy_rises,
            ),
            TOO_STALE,
        ),
        look=THEN,
        follows_from=(Concern.COMPONENTS,),
    ),
    Rule(
        concern=Concern.LENGTH,
        shows="the length of the answers is far from its first values, and the rewards are not higher; or the answers "
        "became empty",
        finds=find.length,
        limits=(find.EMPTY, find.LOST_LENGTH, find.GROWN_LENGTH, find.LEAST_GAIN, find.CLEAR),
        causes=(
            HACKED,
            Cause("the loss counts long and short answers differently: use another algorithm.loss or aggregation"),
            LOWER_RATE,
        ),
        look=THEN,
        follows_from=(Concern.CUT, Concern.COMPONENTS, Concern.ENTROPY),
    ),
    Rule(
        concern=Concern.STALE_DATA,
        shows="few tokens dominate a step",
        finds=find.stale_data,
        limits=(find.LOW_ESS, find.LEAST_STEPS),
        causes=(TOO_STALE, LOWER_RATE),
        look=REPORT,
        follows_from=(Concern.PARITY,),
    ),
    Rule(
        concern=Concern.HIGH_KL,
        shows="the trained policy is far from the one that sampled",
        finds=find.high_kl,
        limits=(find.HIGH_KL, find.LEAST_STEPS),
        causes=(LOWER_RATE, TOO_STALE),
        look=REPORT,
        follows_from=(Concern.PARITY, Concern.STALE_DATA),
    ),
    Rule(
        concern=Concern.HELDOUT,
        shows="the last two held-out rewards fall, or are far below the best one, while the training reward rises",
        finds=find.heldout,
        limits=(find.WORSE, find.CLEAR),
        causes=(
            Cause("the model remembers its questions: add questions, or lower data.epochs"),
            HACKED,
            Cause("the held-out questions are of another kind: see eval.sets and data.heldout_fraction"),
            Cause("an earlier checkpoint is better: set checkpoint.keep_best"),
        ),
        look=REPORT,
        follows_from=(Concern.COMPONENTS,),
    ),
)


def notes_of(seen: Evidence) -> tuple[Note, ...]:
    """Returns the notes about a run, the most urgent first. A fault that another one explains is in the `consequences`
    of the note of its cause."""
    found = {rule.concern: (rule, fact) for rule in RULES if (fact := rule.finds(seen)) is not None}
    roots = {concern: _root(concern, found) for concern in found}
    return tuple(
        _note(rule, fact, seen, [found[other][1].fact for other, root in roots.items() if root is concern != other])
        for concern, (rule, fact) in found.items()
        if roots[concern] is concern
    )


def _root(concern: Concern, found: dict[Concern, tuple[Rule, Finding]]) -> Concern:
    """Returns the fault that explains this one, directly or through others, and that no other found fault explains. It
    is the fault itself if no found fault explains it."""
    rule, _ = found[concern]
    cause = next((other for other in rule.follows_from if other in found), None)
    return concern if cause is None else _root(cause, found)


def _note(rule: Rule, fact: Finding, seen: Evidence, consequences: Sequence[str]) -> Note:
    tags = " or ".join(seen.setting.hidden_tags)
    since_step = fact.since_step
    last_step = seen.steps[-1].step if seen.steps else 0
    return Note(
        concern=rule.concern,
        number=fact.number,
        fact=fact.fact,
        since_step=since_step,
        causes=tuple(cause.text.replace("{tags}", tags) for cause in rule.causes if cause.when(seen)),
        look=rule.look.format(run=shlex.quote(seen.setting.run), step=last_step if since_step is None else since_step),
        consequences=tuple(consequences),
    )
