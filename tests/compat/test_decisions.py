"""Decisions asked by the openai client, langchain, pydantic-ai and litellm, unmodified; `make compat` has them."""

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.support.servers import MODEL, FakeServer

openai = pytest.importorskip("openai")
pytest.importorskip("openai.resources.decisions", reason="needs openai 3.57: run by `make compat`")
langchain = pytest.importorskip("langchain_openai.decisions", reason="run by `make compat`")
litellm = pytest.importorskip("litellm", reason="run by `make compat`")
pydantic_ai = pytest.importorskip("pydantic_ai", reason="run by `make compat`")
decision = pytest.importorskip("pydantic_ai.models.decision")
system_one = pytest.importorskip("pydantic_ai.models.system_one")
openai_decisions = pytest.importorskip("pydantic_ai.models.openai_decisions")
providers = pytest.importorskip("pydantic_ai.providers.system_one")
openai_provider = pytest.importorskip("pydantic_ai.providers.openai")

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]  # they warn of their own deprecations
INPUT = "I was charged twice, and nobody answers."
OPENAIS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "angry", "instructions": "Is the customer angry?"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": "money", "description": "x"}, {"value": True}]},
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent?",
        "levels": [{"label": "low"}, {"label": "high"}],
    },
]
SYSTEM_ONES: dict[str, Any] = {
    "angry": {"type": "noul", "instructions": "Is the customer angry?"},
    "team": {"type": "choice", "instructions": "Which?", "criteria": {"money": "Payments", "other": None}},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "middle", "high"]},
}


class Handling(BaseModel):
    """How to handle a letter."""

    angry: bool = Field(description="Is the customer angry?")
    team: Literal["money", "goods", "other"] = Field(description="Which team should answer?")
    urgency: float = Field(ge=0, le=1, description="Is it urgent?")


def test_the_openai_client(server: FakeServer):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        decision = client.decisions.create(model=MODEL, input=INPUT, questions=OPENAIS)
        message = {"role": "user", "content": [{"type": "input_text", "text": INPUT}]}
        again = client.decisions.create(
            model=MODEL, input=[message], questions=OPENAIS, safety_identifier="me", prompt_cache_key="k"
        )
        with pytest.raises(openai.BadRequestError, match="'a' is there twice"):
            client.decisions.create(
                model=MODEL, input="x", questions=[{**OPENAIS[1], "choices": [{"value": "a"}, {"value": "a"}]}]
            )
    type(decision).model_validate(decision.model_dump(), strict=True)
    angry, team, urgency = decision.answers
    assert (angry.name, team.name, urgency.name) == ("angry", None, "urgency")
    assert 0 <= angry.probability <= 1
    assert team.choice in ("money", True)
    assert [each.label for each in urgency.probabilities] == ["low", "high"]
    assert again.answers == decision.answers
    assert decision.usage.input_tokens_details.cache_write_tokens == 0


def test_langchain(server: FakeServer):
    decisions = langchain.OpenAIDecisions(model=MODEL, base_url=server.url + "/v1", api_key="none")
    questions = {
        "angry": langchain.Predicate(instructions="Is the customer angry?"),
        "team": langchain.Choice(instructions="Which?", choices={"money": "Payments", True: None}),
        "urgency": langchain.Score(instructions="How urgent?", levels=["low", "high"]),
    }
    found = decisions.invoke({"input": INPUT, "questions": questions})
    assert set(found.predicates) | set(found.choices) | set(found.scores) == set(questions)
    assert found.scores["urgency"].legend == {0: "low", 1: "high"}
    talk = [("system", "s"), ("user", "u")]
    more = asyncio.run(decisions.ainvoke({"input": [list(turn) for turn in talk], "questions": questions}))
    assert set(more.answers) == set(questions)


@pytest.mark.parametrize("kind", ["systemone", "openai"])
def test_pydantic_ai(server: FakeServer, kind: str):
    """It refuses answers that do not match their questions, and scores that do not follow from their probabilities."""
    if kind == "systemone":
        provider = providers.SystemOneProvider(base_url=server.url, api_key="none")
        model = system_one.SystemOneModel(MODEL, provider=provider)
    else:
        provider = openai_provider.OpenAIProvider(base_url=server.url + "/v1", api_key="none")
        model = openai_decisions.OpenAIDecisionsModel(MODEL, provider=provider)
    found, scores = asyncio.run(judged(model))
    assert found.output.team in ("money", "goods", "other")
    assert found.usage.input_tokens > 0
    assert all(0 <= answer.score <= top for top, answer in scores)


async def judged(model: Any) -> tuple[Any, list[tuple[int, Any]]]:
    """How to handle a letter; and scores by 2 to 10 levels, with the highest of each."""
    found = await pydantic_ai.Agent(model, output_type=Handling).run(INPUT)
    scores = []
    for count in range(2, 11):
        question = decision.ScoreQuestion(instructions="How much?", criteria=[f"level {i}" for i in range(count)])
        request = decision.DecisionRequest(state=INPUT, questions={"q": question})
        scores.append((count - 1, (await model.decide(request, {})).answers["q"]))
    return found, scores


@pytest.mark.parametrize("provider", ["ollama", "hosted_vllm", "openai"])
def test_litellm(server: FakeServer, provider: str):
    about = {"model": f"{provider}/{MODEL}", "api_base": server.url, "api_key": "none"}
    found = litellm.systemone(state={"letter": INPUT}, questions=SYSTEM_ONES, **about)
    assert set(found.answers) == set(SYSTEM_ONES)
    assert found.usage.input_tokens > 0
    told = litellm.decisions(input=INPUT, questions=OPENAIS, **about)
    assert [answer.name for answer in told.answers] == ["angry", None, "urgency"]
