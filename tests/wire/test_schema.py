"""schemathesis reads /openapi.json and calls every operation with generated values, valid and invalid ones."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.servers import fake_server

NUM_EXAMPLES = 4
LAST = ["/sleep", "/wake_up", "/stopService"]
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(120)
def test_no_described_operation_fails():
    """The operation that stops the service comes last, after those that put the model to sleep and wake it."""
    with fake_server(max_iter_times=16) as server:
        description = server.client.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(description)
        operations = [result.ok() for result in schema.get_all_operations()]
        operations.sort(key=lambda operation: LAST.index(operation.path) if operation.path in LAST else -1)
        assert len(operations) == sum(map(len, description["paths"].values()))
        for operation in operations[:-1]:
            _ask(operation, server.url)
        assert operations[-1].Case().call(base_url=server.url).status_code == 200


def _ask(operation: schemathesis.APIOperation, url: str) -> None:
    positive, negative = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

    @SETTINGS
    @given(case=positive if operation.method == "get" else positive | negative)
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=url)
        assert response.status_code < 500, f"{case.method} {case.formatted_path}: {response.text}"

    ask()
