"""An agent with the package openai-agents, which calls the tools itself.

pip install openai-agents
PYTHONPATH=configs/agents asyncrl up -c configs/agents/calculator.yaml environment.agent=openai_agents:run
"""

from agents import Agent, AgentsException, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from arithmetic import PARAMETERS, called, reward
from openai import AsyncOpenAI

from asyncrl import Session, Task

set_tracing_disabled(True)  # traces would be sent to OpenAI
CALLS = 3


async def calculate(context: object, arguments: str) -> str:
    """Answers a call of the calculator."""
    return called(arguments)


# `function_tool` would describe the function with more words, which the tiny model does not know.
calculator = FunctionTool(
    name="calculator",
    description="",
    params_json_schema=PARAMETERS,
    on_invoke_tool=calculate,
    strict_json_schema=False,
)


async def run(session: Session, task: Task) -> float:
    """Answers one question. Returns 1 if the answer is right."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=None) as client:
        model = OpenAIChatCompletionsModel(model=session.model, openai_client=client)
        agent = Agent(name="calculator", model=model, tools=[calculator])
        try:
            result = await Runner.run(agent, task.question, max_turns=CALLS)
        except AgentsException:  # the model called too often, or called a tool that does not exist
            return 0.0
    return reward(result.final_output, task.answer)
