// The task with Vercel's AI SDK and its default provider, which speaks /v1/responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" });
const tools = {
  read_file: tool({ inputSchema: z.object({ path: z.string() }), execute: ({ path }) => readFileSync(path, "utf8") }),
  write_file: tool({
    inputSchema: z.object({ path: z.string(), text: z.string() }),
    execute: ({ path, text }) => (writeFileSync(path, text), "written"),
  }),
  run: tool({ inputSchema: z.object({ command: z.string() }), execute: ({ command }) => execSync(command).toString() }),
};
const { text } = await generateText({
  model: openai(process.env.MODEL), tools, prompt: process.env.TASK, stopWhen: stepCountIs(6),
  providerOptions: { openai: { store: false } },
});
console.log(text);
