"""An agent with LangGraph: a graph of the model and its tools.

pip install langgraph langchain-openai
PYTHONPATH=. asyncrl up -c calculator environment.agent=langgraph_agent:run    # in the folder of this file
"""

from arithmetic import TOOL, calculated, reward
from httpx import Timeout
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from asyncrl import Session, Task

CALLS = 3


@tool
def calculator(expression: str) -> str:
    """Calculates."""
    return calculated(expression)


async def run(session: Session, task: Task) -> float:
    """Answers one question. Returns 1 if the answer is right."""
    no_limit = Timeout(None)
    chat = ChatOpenAI(model=session.model, base_url=session.base_url, api_key=session.api_key, timeout=no_limit)
    # `[calculator]` would describe the function with more words, which the tiny model does not know.
    model = chat.bind_tools([TOOL])

    async def answer(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(answer)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    try:
        state = await graph.compile().ainvoke({"messages": [("user", task.question)]}, {"recursion_limit": 2 * CALLS})
    except GraphRecursionError:  # the model called the calculator too often
        return 0.0
    return reward(state["messages"][-1].text, task.answer)
