"""Documents of config.json for tests to start from."""

import json
import re
from typing import Any

from kvloom.server.run.config_cli import starting_point


def mock_document(**schedule: Any) -> dict[str, Any]:
    """What `kvloom config init` writes, for the mock model; `schedule` overrides ScheduleParam."""
    document: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", starting_point(), flags=re.MULTILINE))
    document["ModelDeployParam"]["ModelParam"][0]["modelInstanceType"] = "StandardMock"
    document["OtherParam"]["ResourceParam"]["preAllocBlocks"] = 1
    document["ScheduleParam"] |= schedule
    return document
