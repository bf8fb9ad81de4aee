"""The task with LlamaIndex."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from task import MODEL, TASK, TOOLS, URL


async def main() -> None:
    llm = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
    )
    print(await FunctionAgent(tools=list(TOOLS), llm=llm).run(TASK))


asyncio.run(main())
