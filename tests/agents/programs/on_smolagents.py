"""The task with smolagents, whose tools are called by their names."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from task import MODEL, TASK, TOOLS, URL

agent = ToolCallingAgent(
    tools=[tool(each) for each in TOOLS], model=OpenAIServerModel(MODEL, api_base=URL, api_key="none")
)
print(agent.run(TASK))
