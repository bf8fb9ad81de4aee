// The task with the package that LibreChat's server answers with, in the settings that LibreChat gives it.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { Providers, Run } from "@librechat/agents";
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const { MODEL, OPENAI_BASE_URL, TASK } = process.env;
const tools = [
  tool(({ path }) => readFileSync(path, "utf8"),
    { name: "read_file", description: "Read a file.", schema: z.object({ path: z.string() }) }),
  tool(({ path, text }) => (writeFileSync(path, text), "written"),
    { name: "write_file", description: "Write a file.", schema: z.object({ path: z.string(), text: z.string() }) }),
  tool(({ command }) => execSync(command).toString(),
    { name: "run", description: "Run a command.", schema: z.object({ command: z.string() }) }),
];
const run = await Run.create({
  runId: "run",
  graphConfig: {
    type: "standard", instructions: "You edit files.", tools,
    llmConfig: {
      provider: Providers.OPENAI, model: MODEL, apiKey: "none", user: "user", streaming: true, streamUsage: true,
      configuration: { baseURL: OPENAI_BASE_URL },
    },
  },
  returnContent: true,
});
const config = { configurable: { thread_id: "chat" }, runId: "run", streamMode: "values", version: "v2" };
const parts = await run.processStream({ messages: [new HumanMessage(TASK)] }, config);
console.log(parts.map((part) => part.text ?? "").join("\n"));
