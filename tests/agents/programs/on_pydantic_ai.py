"""The task with pydantic-ai over /v1/messages."""

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from task import MODEL, TASK, TOOLS, URL

provider = AnthropicProvider(api_key="none", base_url=URL.removesuffix("/v1"))
agent = Agent(AnthropicModel(MODEL, provider=provider), tools=list(TOOLS))
print(agent.run_sync(TASK).output)
