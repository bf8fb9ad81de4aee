"""The agents: how each is installed and started without a network, and what its model answers in the task.

The task: read notes.txt, replace a word in it, count its words with `wc`, and end.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MODEL = "local"
VOCABULARY = "qwen2.5-coder-1.5b"  # the real model; the scripted one has its vocabulary and chat template
TASK = "Read notes.txt, replace cat by dog in it, then count its words with wc and say how many there are."
END = "The file has 3 words."
Step = tuple[str, str]  # what the model answers, and what the prompt after it must show
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one agent runs. `bin`: of its packages; `work`: the folder with the task's file; `url`: of the server."""

    bin: Path
    home: Path
    work: Path
    url: str

    @property
    def file(self) -> str:
        return str(self.work / "notes.txt")


@dataclass(frozen=True, slots=True)
class Agent:
    """`packages`: of npm, or of PyPI if `is_python`. `files`: what is written before the start, below the home folder.
    `steps`: one for each answer but the last.
    """

    name: str
    dialect: str
    packages: Sequence[str]
    command: Callable[[Place], Sequence[str]]
    steps: Callable[[Place], Sequence[Step]]
    is_python: bool = False
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    files: Callable[[Place], Mapping[str, str]] = lambda place: {}
    mark: str = "<tool_response>"  # before each result in a prompt
    end: str = END  # the last answer, which makes the agent say END


def call(name: str, **arguments: object) -> str:
    """A call as Qwen's models write it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def own_steps(place: Place) -> Sequence[Step]:
    """Of the programs in programs/, which all have the same three tools."""
    return (
        (call("read_file", path=place.file), "the cat sleeps"),
        (call("write_file", path=place.file, text="the dog sleeps\n"), "written"),
        (call("run", command=f"wc -w {place.file}"), f"3 {place.file}"),
    )


def own(name: str, program: str, packages: Sequence[str], dialect: str = "chat") -> Agent:
    """A Python program in programs/ over a framework."""

    def command(place: Place) -> Sequence[str]:
        return str(place.bin / "python"), str(PROGRAMS / f"on_{program}.py")

    return Agent(name, dialect, packages, command, own_steps, True, own_environment)


def own_environment(place: Place) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "none", "TASK": TASK, "MODEL": MODEL}


CODEX_FREE = "--dangerously-bypass-approvals-and-sandbox"
CODEX = """model = "local"
model_provider = "kvloom"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.kvloom]
name = "kvloom"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "permission": {"*": "allow"},
    "model": "kvloom/local",
    "small_model": "kvloom/local",
}
QWEN = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"disableAutoUpdate": True},
    "security": {"auth": {"selectedType": "openai"}},
}
CONTINUE = """name: local
version: 0.0.1
schema: v1
models:
  - {{name: local, provider: openai, model: local, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}}
"""
EDIT = "notes.txt\n```\n<<<<<<< SEARCH\nthe cat sleeps\n=======\nthe dog sleeps\n>>>>>>> REPLACE\n```\n"


def opencode_files(place: Place) -> Mapping[str, str]:
    models = {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 8192}}}
    options = {"baseURL": f"{place.url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "kvloom", "options": options, "models": models}
    return {".config/opencode/opencode.json": json.dumps({**OPENCODE, "provider": {"kvloom": provider}})}


AGENTS = (
    Agent(
        "Codex CLI", "Responses", ["@openai/codex@0.171.0"],
        lambda at: (str(at.bin / "codex"), "exec", "--skip-git-repo-check", CODEX_FREE, TASK),
        lambda at: (
            (call("exec_command", cmd="cat notes.txt"), "the cat sleeps"),
            (call("exec_command", cmd="sed -i s/cat/dog/ notes.txt"), "exited with code 0"),
            (call("exec_command", cmd="wc -w notes.txt"), "3 notes.txt"),
        ),
        files=lambda at: {".codex/config.toml": CODEX.format(url=at.url)},
    ),
    Agent(
        "Claude Code", "Messages", ["@anthropic-ai/claude-code@2.1.332"],
        lambda at: (str(at.bin / "claude"), "-p", "--dangerously-skip-permissions", TASK),
        lambda at: (
            (call("Read", file_path=at.file), "the cat sleeps"),
            (call("Edit", file_path=at.file, old_string="cat", new_string="dog"), "updated successfully"),
            (call("Bash", command="wc -w notes.txt", description="count"), "3 notes.txt"),
        ),
        environment=lambda at: {
            "ANTHROPIC_BASE_URL": at.url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1",
        },
    ),
    Agent(
        "opencode", "chat", ["opencode-ai@1.18.33"],
        lambda at: (str(at.bin / "opencode"), "run", "-m", f"kvloom/{MODEL}", TASK),
        lambda at: (
            (call("read", filePath=at.file), "the cat sleeps"),
            (call("edit", filePath=at.file, oldString="cat", newString="dog"), "Edit applied successfully"),
            (call("bash", command="wc -w notes.txt", description="count"), "3 notes.txt"),
        ),
        environment=lambda at: dict.fromkeys(
            ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"), "1"
        ),
        files=opencode_files,
    ),
    Agent(
        "Qwen Code", "chat", ["@qwen-code/qwen-code@0.24.4"],
        lambda at: (str(at.bin / "qwen"), "--yolo", "-p", TASK),
        lambda at: (
            (call("read_file", file_path=at.file), "the cat sleeps"),
            (call("edit", file_path=at.file, old_string="cat", new_string="dog"), "has been updated"),
            (call("run_shell_command", command="wc -w notes.txt", is_background=False), "3 notes.txt"),
        ),
        environment=lambda at: {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        files=lambda at: {".qwen/settings.json": json.dumps(QWEN)},
    ),
    Agent(
        "Continue CLI", "chat", ["@continuedev/cli@1.5.47"],
        lambda at: (str(at.bin / "cn"), "-p", "--auto", "--config", str(at.home / "config.yaml"), TASK),
        lambda at: (
            (call("Read", filepath=at.file), "the cat sleeps"),
            (call("Edit", file_path=at.file, old_string="cat", new_string="dog"), "+the dog sleeps"),
            (call("Bash", command="wc -w notes.txt"), "3 notes.txt"),
        ),
        environment=lambda at: {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
        files=lambda at: {"config.yaml": CONTINUE.format(url=at.url)},
    ),
    Agent(
        "aider", "chat", ["aider-chat==0.86.2"],
        lambda at: (
            *(str(at.bin / "aider"), "--model", f"openai/{MODEL}", "--edit-format", "diff", "--no-git", "--yes-always"),
            *("--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-stream", "--auto-test"),
            *("--test-cmd", "! wc -w notes.txt", "--message", TASK, "notes.txt"),
        ),
        lambda at: ((EDIT, "3 notes.txt"),),
        is_python=True,
        environment=lambda at: {"OPENAI_API_BASE": f"{at.url}/v1", "OPENAI_API_KEY": "none"},
    ),
    own("OpenAI Agents SDK", "openai_agents", ["openai-agents==0.24.0"], "Responses"),
    replace(
        own("litellm proxy", "litellm_proxy", ["litellm[proxy]==1.108.0", "openai-agents==0.24.0"], "Responses"),
        environment=lambda at: {**own_environment(at), "PROXY": str(at.bin / "litellm")},
    ),
    own("LangGraph", "langgraph", ["langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"]),
    own("pydantic-ai", "pydantic_ai", ["pydantic-ai-slim[openai,anthropic]==2.68.0"], "Messages"),
    replace(
        own("smolagents", "smolagents", ["smolagents[openai]==1.26.0"]),
        mark="Observation:\n",
        end=call("final_answer", answer=END),
    ),
    own("LlamaIndex", "llama_index", ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]),
    Agent(
        "AI SDK", "Responses", ["ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"],
        lambda at: ("node", str(at.home.parent / "on_ai_sdk.mjs")),
        own_steps,
        environment=own_environment,
    ),
    Agent(
        "LibreChat", "chat", ["@librechat/agents@3.9.2"],
        lambda at: ("node", str(at.home.parent / "on_librechat.mjs")),
        own_steps,
        environment=own_environment,
    ),
)  # fmt: skip
