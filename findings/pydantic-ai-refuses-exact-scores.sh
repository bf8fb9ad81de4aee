#!/usr/bin/env bash
# Expected: pydantic-ai's OpenAIDecisionsModel takes a score with its probabilities as floats, as a softmax and its mean
# are; its SystemOneModel does, with a tolerance of 1e-6.
# Happens: it takes the digits of each number as its precision. Of a float with all its digits the error that is
# allowed is far below that of the sum of floats, so the answer is refused as invalid. With 12 decimals it is taken.
# pydantic-ai-slim 2.68.0, openai 3.57.0, run 2026-11-28:
#   exact: 21 of 40 refused; with 12 decimals: 0 of 40
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check pydantic-ai-slim==2.68.0 openai==3.57.0
cd "$work"
env/bin/python - <<'PY' 2>/dev/null
import asyncio
import json
import math
import random

import httpx2
from openai import AsyncOpenAI
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.decision import DecisionRequest, ScoreQuestion
from pydantic_ai.models.openai_decisions import OpenAIDecisionsModel
from pydantic_ai.providers.openai import OpenAIProvider

USAGE = {
    "input_tokens": 1, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 1,
}


def scored(draw, digits):
    weights = [math.exp(draw.uniform(-3, 3)) for _ in range(5)]
    probs = [weight / sum(weights) for weight in weights]
    score = sum(level * prob for level, prob in enumerate(probs))
    each = [{"label": str(i), "value": i, "probability": round(prob, digits)} for i, prob in enumerate(probs)]
    answer = {"type": "score", "name": "q", "score": round(score, digits), "confidence": 0.5, "probabilities": each}
    return {"model": "m", "answers": [answer], "usage": USAGE}


async def refused(digits, count=40):
    draw, number = random.Random(0), 0
    reply = httpx2.MockTransport(lambda request: httpx2.Response(200, json=scored(draw, digits)))
    client = AsyncOpenAI(api_key="k", http_client=httpx2.AsyncClient(transport=reply))
    model = OpenAIDecisionsModel("m", provider=OpenAIProvider(openai_client=client))
    question = ScoreQuestion(instructions="How much?", criteria=list("abcde"))
    for _ in range(count):
        try:
            await model.decide(DecisionRequest(state="x", questions={"q": question}), {})
        except UnexpectedModelBehavior:
            number += 1
    return number


exact, rounded = asyncio.run(refused(17)), asyncio.run(refused(12))
print(f"exact: {exact} of 40 refused; with 12 decimals: {rounded} of 40")
assert exact > 0 and rounded == 0
PY
