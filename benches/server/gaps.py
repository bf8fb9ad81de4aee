"""Gaps: how long a stream stalls while another client sends a body that is large, odd or hostile.

`python -m benches.server.gaps` serves the demo model (`--url` takes a server that runs), keeps one stream going, sends
one body of each kind after the other and prints a JSON line for each: its size, the status of its answer, how long that
took, the longest gap between two events of the stream meanwhile, and in the three seconds before, with no body.
`memory_mib` is the server's own process. `--only NAME` runs some of them.
"""

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from kvloom.processes.inside import signal_at_end_of_thread

WORDS = "the lighthouse keeper wrote, once more, that 12 ships had passed. "
MIB = 1 << 20
SIZE = 39 * MIB  # under the limit of 40
READ_S = 600
QUIET_S = 3


def _chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


def _filled(text: str, size: int) -> str:
    return (text * (size // len(text.encode()) + 1))[: size // (len(text.encode()) // len(text))]


def bodies() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Name -> path and body."""
    message = b'{"role":"user","content":"hi"},'
    chat, text, embed = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    return {
        "text of 16 kB": (chat, lambda: _chat(_filled(WORDS, 15_000))),
        "text of 0.5 MB": (chat, lambda: _chat(_filled(WORDS, MIB // 2))),
        "text of 2.4 MB": (chat, lambda: _chat(_filled(WORDS, 24 * MIB // 10))),
        "text of 39 MB": (chat, lambda: _chat(_filled(WORDS, SIZE))),
        "one word of 39 MB": (text, lambda: json.dumps({"prompt": "a" * SIZE}).encode()),
        "spaces of 39 MB": (text, lambda: json.dumps({"prompt": " " * SIZE}).encode()),
        "escapes of 39 MB": (text, lambda: b'{"prompt":"' + b"\\u00e9" * (SIZE // 6) + b'"}'),
        "special tokens of 39 MB": (chat, lambda: _chat("<|im_end|>" * (SIZE // 10))),
        "50,000 messages": (chat, lambda: b'{"messages":[' + (message * 50_000)[:-1] + b"]}"),
        "1.2 million messages": (chat, lambda: b'{"messages":[' + (message * (SIZE // len(message)))[:-1] + b"]}"),
        "13 million ids": (text, lambda: b'{"prompt":[' + b"12," * (SIZE // 3 - 10) + b"1]}"),
        "texts of 39 MB": (embed, lambda: json.dumps({"input": [_filled(WORDS, SIZE // 1000)] * 990}).encode()),
        "unknown lists in lists": (text, lambda: b'{"prompt":"a","x":[' + b"[]," * (SIZE // 3 - 20) + b"1]}"),
        "known lists in lists": (chat, lambda: b'{"messages":[{}],"functions":[' + b"[]," * (SIZE // 3 - 20) + b"1]}"),
        "deep nesting": (text, lambda: b'{"prompt":"a","x":' + b"[" * (SIZE - 100)),
        "a schema": (
            chat,
            lambda: b'{"messages":[{"content":"a"}],"guided_json":{"enum":[' + b"1," * (SIZE // 2 - 99) + b"1]}}",
        ),
        "a grammar": (
            chat,
            lambda: json.dumps({"messages": [{"content": "a"}], "guided_regex": "(a|b)" * 39_000}).encode(),
        ),
        "stops": (text, lambda: json.dumps({"prompt": "a", "stop": ["b"] * (SIZE // 6)}).encode()),
        **_accepted(),
        **_grammars(),
        "tools": (
            chat,
            lambda: json.dumps(
                {"messages": [{"content": "a"}], "tools": [{"function": {"name": "a" * 300_000}}] * 120}
            ).encode(),
        ),
        "count_tokens": ("/v1/messages/count_tokens", lambda: _chat(_filled(WORDS, SIZE))),
        "tokenize": ("/tokenize", lambda: json.dumps({"prompt": _filled(WORDS, SIZE)}).encode()),
        "tokenize with texts": (
            "/tokenize",
            lambda: json.dumps({"prompt": _filled(WORDS, MIB), "return_token_strs": True}).encode(),
        ),
        "tokenize of 1 MB": ("/tokenize", lambda: json.dumps({"prompt": _filled(WORDS, MIB)}).encode()),
        "detokenize": ("/detokenize", lambda: b'{"tokens":[' + b"12," * (SIZE // 3 - 10) + b"1]}"),
        "tokenizer": ("/v1/tokenizer", lambda: json.dumps({"inputs": _filled(WORDS, SIZE)}).encode()),
        "TGI": ("/generate", lambda: json.dumps({"inputs": _filled(WORDS, SIZE)}).encode()),
        "vLLM": ("/generate", lambda: json.dumps({"prompt": _filled(WORDS, SIZE)}).encode()),
        "native ids": ("/infer_token", lambda: b'{"input_id":[' + b"12," * (SIZE // 3 - 10) + b"1]}"),
        "Triton": ("/v2/models/smollm2/generate", lambda: json.dumps({"text_input": _filled(WORDS, SIZE)}).encode()),
        "Responses": ("/v1/responses", lambda: json.dumps({"input": _filled(WORDS, SIZE)}).encode()),
        "no JSON": (chat, lambda: b"\xff" * SIZE),
    }


def _accepted() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Bodies that the server accepts and computes."""
    chat, text, embed = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
    return {
        "1,000 prompts of 290 ids": (
            text,
            lambda: json.dumps({"prompt": [[12] * 290] * 1000, "max_tokens": 1}).encode(),
        ),
        "2,000 texts": (embed, lambda: json.dumps({"input": [WORDS * 2] * 2000}).encode()),
        "logit_bias": (
            text,
            lambda: json.dumps({"prompt": "a", "max_tokens": 1, "logit_bias": {i: 1 for i in range(49_000)}}).encode(),
        ),
        "logit_bias of 128 answers": (
            text,
            lambda: json.dumps(
                {"prompt": "a", "max_tokens": 2, "n": 128, "logit_bias": {i: 1 for i in range(49_000)}}
            ).encode(),
        ),
        "128 answers with 20 logprobs": (
            chat,
            lambda: json.dumps(
                {"messages": _said("Once"), "n": 128, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}
            ).encode(),
        ),
        "best of 128": (
            text,
            lambda: json.dumps({"prompt": "a", "n": 1, "best_of": 128, "max_tokens": 20, "ignore_eos": True}).encode(),
        ),
        "prompt_logprobs": (
            text,
            lambda: json.dumps({"prompt": WORDS * 100, "max_tokens": 1, "prompt_logprobs": 20}).encode(),
        ),
        "an echo with logprobs": (
            text,
            lambda: json.dumps(
                {"prompt": [f"{i} " + WORDS * 100 for i in range(8)], "max_tokens": 0, "echo": True, "logprobs": 5}
            ).encode(),
        ),
        "distinct long prompts": (
            text,
            lambda: json.dumps({"prompt": [f"{i} " + WORDS * 100 for i in range(16)], "max_tokens": 1}).encode(),
        ),
        "stops that are accepted": (
            text,
            lambda: json.dumps(
                {"prompt": "a", "max_tokens": 40, "stop": ["b" * 200 + str(i) for i in range(4)]}
            ).encode(),
        ),
        "an echo": (text, lambda: json.dumps({"prompt": [WORDS * 100] * 100, "max_tokens": 0, "echo": True}).encode()),
    }


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _grammars() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Grammars near the maximum length, in every field that takes one."""
    regex, words = "(a|b)" * 39_000, [f"word{i}" for i in range(14_000)]
    rules = "root ::= " + " | ".join(f'"w{i}"' for i in range(15_000))
    properties = {f"p{i}": {"type": "string"} for i in range(6_000)}
    given: dict[str, dict[str, Any]] = {
        "structured regex": {"structured_outputs": {"regex": regex}},
        "regex": {"regex": regex},
        "regex of classes": {"guided_regex": "[a-z]+" * 32_000},
        "regex of wild cards": {"guided_regex": ".*a" * 65_000},
        "regex of counts": {"guided_regex": "(.{0,1000}a){1000}"},
        "ebnf": {"ebnf": rules},
        "guided choice": {"guided_choice": words},
        "schema of an enum": {"guided_json": {"enum": words}},
        "schema of a pattern": {"guided_json": {"type": "string", "pattern": regex}},
        "schema of properties": {"guided_json": {"type": "object", "properties": properties}},
        "structural tag": {"structural_tag": {"format": {"type": "regex", "pattern": regex}}},
    }
    return {
        name: (
            "/v1/chat/completions",
            lambda fields=fields: json.dumps({"messages": _said("Say it."), "max_tokens": 8, **fields}).encode(),
        )
        for name, fields in given.items()
    }


class Neighbour:
    """Another client's stream, read by a separate process."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._longest_s = context.Value("d", 0.0)
        self._num_events = context.Value("q", 0)
        self._process = context.Process(target=_read, args=(url, self._longest_s, self._num_events), daemon=True)
        self._process.start()
        while self._num_events.value < 20:
            time.sleep(0.01)

    def take_longest_s(self) -> float:
        """The longest gap between two of its events since the last call, in seconds."""
        with self._longest_s.get_lock():
            longest_s, self._longest_s.value = self._longest_s.value, 0.0
        return longest_s

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _read(url: str, longest_s: Any, num_events: Any) -> None:
    body = {"prompt": "Once", "max_tokens": 1900, "stream": True, "ignore_eos": True, "temperature": 0}
    while True:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=READ_S, trust_env=False) as response:
            last_s = 0.0  # the time between two streams is no gap
            for _ in response.iter_lines():
                now_s = time.perf_counter()
                with longest_s.get_lock():
                    longest_s.value = max(longest_s.value, now_s - last_s if last_s else 0.0)
                last_s = now_s
                num_events.value += 1


@contextlib.contextmanager
def served(url: str | None) -> Iterator[tuple[str, int | None]]:
    """The URL of a server, and its process id if this bench started it."""
    if url:
        yield url, None
        return
    command = [sys.executable, "-m", "kvloom.cli", "serve", "--port", "0", "--max-seq-len", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=signal_at_end_of_thread)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "served on http" in line:
                yield line.split("served on ")[1].split(". Try")[0], process.pid
                break
    finally:
        process.terminate()
        process.wait()


def _memory_mib(pid: int | None) -> int | None:
    if pid is None:
        return None
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--only", nargs="*", help="the names of some bodies")
    args = parser.parse_args()
    with served(args.url) as (url, pid), httpx.Client(base_url=url, timeout=READ_S, trust_env=False) as client:
        neighbour = Neighbour(url)
        for name, (path, make) in bodies().items():
            if args.only and name not in args.only:
                continue
            content = make()
            neighbour.take_longest_s()
            time.sleep(QUIET_S)
            quiet_ms = round(neighbour.take_longest_s() * 1e3, 1)
            start_s = time.perf_counter()
            try:
                status: int | str = client.post(path, content=content).status_code
            except httpx.HTTPError as error:
                status = type(error).__name__
            result = {"body": name, "path": path, "bytes": len(content), "status": status}
            result["answered_s"] = round(time.perf_counter() - start_s, 2)
            time.sleep(0.2)
            result |= {"gap_ms": round(neighbour.take_longest_s() * 1e3, 1), "quiet_gap_ms": quiet_ms}
            print(json.dumps({**result, "memory_mib": _memory_mib(pid)}), flush=True)
        neighbour.close()


if __name__ == "__main__":
    main()
