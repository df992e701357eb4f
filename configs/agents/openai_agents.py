"""An agent with the package openai-agents, which calls the tools itself.

pip install openai-agents
PYTHONPATH=. asyncrl up -c calculator environment.agent=openai_agents:run    # in the folder of this file
"""

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from arithmetic import TOOL, calculated, reward
from openai import AsyncOpenAI

from asyncrl import Session, Task

set_tracing_disabled(True)  # traces would be sent to OpenAI
CALLS = 3
# The package describes the calculator with more words, which the tiny model does not know.
SHORT = ModelSettings(extra_body={"tools": [TOOL]})


@function_tool
def calculator(expression: str) -> str:
    """Calculates."""
    return calculated(expression)


async def run(session: Session, task: Task) -> float:
    """Answers one question. Returns 1 if the answer is right."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=None) as client:
        model = OpenAIChatCompletionsModel(model=session.model, openai_client=client)
        agent = Agent(name="calculator", model=model, model_settings=SHORT, tools=[calculator])
        try:
            result = await Runner.run(agent, task.question, max_turns=CALLS)
        except AgentsException:  # the model called too often, or called a tool that does not exist
            return 0.0
    return reward(result.final_output, task.answer)
