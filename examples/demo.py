"""`make demo`: start a server, ask one question, print the streamed answer, stop the server."""

import json
import re
import signal
import subprocess
import sys

import httpx

QUESTION = "Write one sentence about the sea."
READY = re.compile(r"is served on (http://\S+:\d+)\.")


def ask(url: str) -> None:
    """Print the streamed answer of the server's first model."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "temperature": 0,
            "max_tokens": 60,
        }
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print()


def main() -> int:
    command = [sys.executable, "-m", "kvloom.cli", "serve", "--port", "0", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            found = READY.search(line)
            if found:
                print(f"> {QUESTION}")
                ask(found[1])
                break
        server.send_signal(signal.SIGTERM)
        return server.wait()


if __name__ == "__main__":
    sys.exit(main())
