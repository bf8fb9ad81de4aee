"""The task with OpenAI's Agents SDK, whose server is litellm's proxy, whose server is ours."""

import json
import os
import runpy
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from task import MODEL, URL

_LIMIT_S = 120.0  # of the proxy's start


def wait_for(url: str) -> None:
    """Until it answers."""
    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
served = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
config = Path.home() / "litellm.json"
key = "sk-of-the-agent"
config.write_text(
    json.dumps(
        {"general_settings": {"master_key": key}, "model_list": [{"model_name": MODEL, "litellm_params": served}]}
    )
)
command = [
    Path(os.environ["PROXY"]),
    "--config",
    config,
    "--host",
    "127.0.0.1",
    "--port",
    str(port),
    "--telemetry",
    "False",
]
proxy = subprocess.Popen(command, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
try:
    wait_for(f"http://127.0.0.1:{port}/health/liveliness")
    os.environ["OPENAI_API_KEY"] = key
    os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/v1"
    runpy.run_path(str(Path(__file__).with_name("on_openai_agents.py")))
finally:
    proxy.kill()
    proxy.wait()
