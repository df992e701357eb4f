"""An OpenEnv environment for agent_clients.py: the model guesses a number from 1 to 9, and is told "higher" or "lower".

uvicorn guess_env:app --port 8000
"""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

HIGHEST = 9
GUESSES = 3


class Guess(Action):
    guess: int


class Hint(Observation):
    text: str


class GuessEnvironment(Environment[Guess, Hint, State]):
    """A game. It ends with the right guess, whose reward is 1, or after `GUESSES` guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._state = State(episode_id=episode_id)
        self._number = random.Random(seed).randint(1, HIGHEST)
        return Hint(text=f"Guess 1-{HIGHEST}")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self._state.step_count += 1
        right = action.guess == self._number
        hint = "right" if right else "higher" if action.guess < self._number else "lower"
        return Hint(text=hint, reward=float(right), done=right or self._state.step_count == GUESSES)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=64)
