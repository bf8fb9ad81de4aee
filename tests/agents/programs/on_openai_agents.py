"""The task with OpenAI's Agents SDK."""

from task import MODEL, TASK, TOOLS

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
agent = Agent(name="editor", instructions="You edit files.", model=MODEL, tools=[function_tool(tool) for tool in TOOLS])
print(Runner.run_sync(agent, TASK).final_output)
