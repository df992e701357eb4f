"""Random histories of calls, checked against the model of `buffer_model.py`. Hypothesis finds and shrinks failures.

Generators crash, commit late or twice, load weights late, and lose replies. Heartbeats and their answers are lost, late
or overtaken, and generators forget tickets that the buffer has. The learner skips steps, gives leases back,
and repeats calls. Rows are lost. The buffer is small and fills up. After every call, buffer and model must agree, the
rules must hold, and a fair continuation must train another step.
"""

import random

from buffer_model import BufferModel
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

COMMON = [
    *["reserve"] * 5, *["commit"] * 5, *["train"] * 5, *["publish_and_all_load"] * 3, *["all_heartbeat"] * 2,
    "lease", "lease", "ack",
]  # fmt: skip
RARE = [
    "heartbeat", "commit_anything", "fail", "time_passes", "crash", "leave", "load", "reserve_without_reply", "skip",
    "give_back", "end_another_step", "succeed", "publish_and_one_loads", "checkpoint", "end_checkpoint", "restore",
    "roll_back", "roll_back_often", "roll_back_often", "save",
    "lose_rows", "is_refused_while_paused", "store", "strand", "strand", "strand", "strand",
    "heartbeat_without_answer", "heartbeat_without_answer", "delay_heartbeat", "deliver_delayed", "give_up",
]  # fmt: skip

CALLS_A_RULE = 10


class BufferHistories(RuleBasedStateMachine):
    @initialize(
        eta=st.sampled_from([2, 1, 3, 0]),
        per_step=st.sampled_from([1, 2, 3]),
        spare_groups=st.sampled_from([9, 1, 0]),
        spare_bytes=st.sampled_from([900, 150, 0]),
        prompts=st.sampled_from([None, None, 9, 4]),
        total_steps=st.sampled_from([50, 5, 2]),
        drop_last=st.booleans(),
        on_deadline=st.sampled_from(["wait", "requeue", "drop", "mask"]),
        most_filtered=st.sampled_from([0, 1, 5]),
    )
    def start(self, **drawn: int | str | None) -> None:
        self.model = BufferModel(**drawn)  # type: ignore[arg-type]

    @rule(seed=st.integers(0, 2**32), rare_percent=st.sampled_from([5, 30]))
    def some_calls(self, seed: int, rare_percent: int) -> None:
        """Makes several weighted random calls.

        With one hypothesis rule for each call, histories hardly ever reached a second step, because hypothesis turns
        rules off for whole histories and prefers few and equal rules.
        """
        rng = random.Random(seed)
        for _ in range(CALLS_A_RULE):
            name = rng.choice(RARE if rng.random() * 100 < rare_percent else COMMON)
            self.call(name, replica=rng.choice("abc"), pick=rng.randrange(10**6))
            self.model.check_slots()
            self.model.check_deadlines()
            self.model.check_ledger()
            self.model.check_prefixes()
            note(f"{name}: {self.model.buffer.counts()}")

    def call(self, name: str, *, replica: str, pick: int) -> None:
        model = self.model
        match name:
            case "reserve" | "reserve_without_reply":
                model.reserve(replica, pick % 5 + 1, reply_lost=name != "reserve")
            case "commit" | "commit_anything" | "fail" | "lose_rows" | "end_another_step" | "roll_back_often":
                getattr(model, name)(pick)
            case "store":
                model.heartbeat(replica, store=pick)
            case "strand":
                model.strand(replica, pick)
            case "heartbeat_without_answer" | "give_up":
                getattr(model, name)(replica, pick)
            case (
                "heartbeat"
                | "crash"
                | "load"
                | "leave"
                | "is_refused_while_paused"
                | "delay_heartbeat"
                | "deliver_delayed"
            ):
                getattr(model, name)(replica)
            case "publish_and_one_loads":
                model.publish()
                model.load(replica)
            case "publish_and_all_load":
                model.publish()
                for each in "abc":
                    model.load(each)
            case "all_heartbeat":
                for each in "abc":
                    model.heartbeat(each)
            case "time_passes":
                model.time_passes(6.0)
            case "end_checkpoint":
                model.end_checkpoint(fails=pick % 3 == 0)
            case "succeed" | "checkpoint" | "save" | "restore" | "roll_back":
                getattr(model, name)()
            case "lease":
                model.start_step()
            case "train":
                model.start_step()
                model.end_step("ack")
            case _:
                model.end_step(name)

    @invariant()
    def another_step_can_be_trained(self) -> None:
        self.model.check_progress(holders_survive=True)
        self.model.check_progress(holders_survive=False)


BufferHistories.TestCase.settings = settings(
    stateful_step_count=10,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
        Phase.shrink,
    ],  # without Phase.explain, which takes minutes here
    report_multiple_bugs=False,
)
TestBufferHistories = BufferHistories.TestCase
