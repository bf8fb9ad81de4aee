"""The task with LangGraph."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import MODEL, TASK, TOOLS

agent = create_agent(ChatOpenAI(model=MODEL), list(TOOLS))
print(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)
