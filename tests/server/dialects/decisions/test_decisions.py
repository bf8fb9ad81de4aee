"""/v1/decisions and /v1/systemone over HTTP: forms of input, questions and answers, and what is refused."""

import base64
from typing import Any

import msgspec
import pytest

from kvloom.server.chat import asking
from kvloom.server.dialects.decisions import wording
from kvloom.server.dialects.decisions.openai import DecisionsBody
from kvloom.server.http.parsing import INLINE_BYTES
from tests.support.models.templates import HERMES, R1, TemplateTokenizer
from tests.support.servers import MODEL, FakeServer, fake_server

CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
PREDICATE = {"type": "predicate", "instructions": "Is it so?"}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "high"}]}
NOUL = {"type": "noul", "instructions": "Is it so?"}
PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


def decided(server: FakeServer, path: str = "/v1/decisions", **fields: Any) -> Any:
    usual: dict[str, Any] = {"input": "x", "questions": [PREDICATE]}
    if path == "/v1/systemone":
        usual = {"state": "x", "questions": {"q": NOUL}}
    answer = server.post(path, {"model": MODEL, **usual, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: FakeServer, path: str, body: Any) -> str:
    answer = server.post(path, {"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def prompt_of(path: str, **fields: Any) -> str:
    """The text that the chat template got for a body, without the questions."""
    TemplateTokenizer.rendered.clear()
    with fake_server(tokenizer=TemplateTokenizer(HERMES)) as server:
        decided(server, path, **fields)
    [text] = {text for text in TemplateTokenizer.rendered if "<input>" in text}
    return text.partition("<input>\n")[2].partition("\n</input>\n\n")[0]


# -- answers


def test_answers_come_in_the_order_of_the_questions_with_their_names(server: FakeServer):
    answer = decided(server, questions=[{**SCORE, "name": "s"}, PREDICATE, {**CHOICE, "name": "c"}])
    first, second, third = answer["answers"]
    assert [(each["type"], each["name"]) for each in answer["answers"]] == [
        ("score", "s"),
        ("predicate", None),
        ("choice", "c"),
    ]
    assert set(first) == {"type", "name", "score", "confidence", "probabilities"}
    assert [(each["label"], each["value"]) for each in first["probabilities"]] == [("low", 0), ("high", 1)]
    assert set(second) == {"type", "name", "probability"}
    assert set(third) == {"type", "name", "choice", "confidence", "probabilities"}
    assert [each["value"] for each in third["probabilities"]] == ["a", "b"]
    assert third["choice"] in ("a", "b")
    assert sum(each["probability"] for each in third["probabilities"]) == pytest.approx(1)
    assert answer["model"] == MODEL
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] > 0
    assert answer["usage"]["output_tokens"] == 0


def test_systemone_answers_by_name(server: FakeServer):
    questions = {
        "urgent": NOUL,
        "team": {"type": "choice", "instructions": ["Which?"], "criteria": {"billing": "Money", "other": None}},
        "how": {"type": "score", "instructions": {"a": 1}, "criteria": ["low", {"is": "mid"}, "high"]},
    }
    answer = decided(server, "/v1/systemone", questions=questions)
    found = answer["answers"]
    assert list(found) == ["urgent", "team", "how"]
    assert set(found["urgent"]) == {"type", "noul"}
    assert set(found["team"]["probabilities"]) == {"billing", "other"}
    assert found["how"]["legend"] == {"0": "low", "1": {"is": "mid"}, "2": "high"}
    assert set(found["how"]["probabilities"]) == {"0", "1", "2"}
    assert 0 <= found["how"]["score"] <= 2
    assert {"input_tokens", "output_tokens"} <= set(answer["usage"])


def test_both_routes_judge_alike(server: FakeServer):
    one = decided(server, input="z", questions=[PREDICATE, CHOICE])["answers"]
    criteria = {"a": None, "b": None}
    two = decided(
        server,
        "/v1/systemone",
        state="z",
        questions={"p": NOUL, "c": {"type": "choice", "instructions": "Which?", "criteria": criteria}},
    )["answers"]
    assert two["p"]["noul"] == one[0]["probability"]
    assert two["c"]["probabilities"] == {each["value"]: each["probability"] for each in one[1]["probabilities"]}


@pytest.mark.parametrize("path", ["/decisions", "/systemone"])
def test_the_routes_are_there_without_v1(server: FakeServer, path: str):
    body = {"input": "x", "questions": [PREDICATE]} if path == "/decisions" else {"state": 1, "questions": {"q": NOUL}}
    assert server.post(path, body).status_code == 200
    assert server.post(path, {**body, "questions": []}).json()["error"]["type"] == "invalid_request_error"


def test_temperature_evens_out(server: FakeServer):
    question = {"type": "choice", "instructions": "?", "criteria": {"a": None, "bb": None, "ccc": None}}

    def probs(**fields: Any) -> dict[str, float]:
        found = decided(server, "/v1/systemone", questions={"q": question}, **fields)
        told: dict[str, float] = found["answers"]["q"]["probabilities"]
        return told

    usual, even = probs(), probs(temperature=100)
    assert probs(temperature=1) == usual
    assert max(even.values()) - min(even.values()) < max(usual.values()) - min(usual.values())
    squared = {label: prob**2 for label, prob in usual.items()}
    total = sum(squared.values())
    assert probs(temperature=0.5) == pytest.approx({label: prob / total for label, prob in squared.items()}, abs=1e-9)


def test_one_answer_alone_is_certain(server: FakeServer):
    questions = {
        "c": {"type": "choice", "instructions": "?", "criteria": {"only": None}},
        "s": {"type": "score", "instructions": "?", "criteria": ["only"]},
    }
    found = decided(server, "/v1/systemone", questions=questions)["answers"]
    assert found["c"] == {"type": "choice", "choice": "only", "confidence": 1.0, "probabilities": {"only": 1.0}}
    assert (found["s"]["score"], found["s"]["confidence"]) == (0.0, 1.0)


# -- what the model is asked


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["billing", "a b", "ü"], ("billing", "a b", "ü")),
        ([True, False], ("true", "false")),
        ([True, "true"], ("true", '"true"')),
        (["", "x"], ('""', '"x"')),
        ([" x", "x"], ('" x"', '"x"')),
        (["a\nb", '"x"'], ('"a\\nb"', '"\\"x\\""')),
    ],
)
def test_labels_are_written_so_that_none_looks_like_another(values: list[str | bool], labels: tuple[str, ...]):
    question = wording.choice("Which?", [(value, "") for value in values], "q")
    assert question.labels == labels
    shown = [f"Answers: {', '.join(labels)}", "\n- ".join(["Answers:", *labels])]
    assert question.text.removeprefix("Which?\n") in shown


def test_a_question_shows_instructions_answers_and_what_they_mean():
    question = wording.score("How much?", [("low", "a bit"), ("high", "")], "q")
    assert question.text == "How much?\nAnswers, the lowest first:\n- low: a bit\n- high"
    assert wording.choice("", [("a", ""), ("b", "")], "q").text == "Answers: a, b"
    assert wording.choice("Which?", [("a, b", ""), ("c", "")], "q").text == "Which?\nAnswers:\n- a, b\n- c"
    assert wording.predicate("Late?", ("it is late", ""), "q").text == "Late?\nAnswers:\n- yes: it is late\n- no"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("  plain \n", "  plain \n"),
        ([{"role": "user", "content": "hi"}], "hi"),
        (
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "a",
        ),
        (
            [{"role": "user", "content": [{"type": "input_json", "data": {"k": [1, None]}}]}],
            '{"k":[1,null]}',
        ),
        (
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ],
            '{"role":"system","content":"s"}\n{"role":"user","content":"u"}\n{"role":"assistant","content":"a"}\n',
        ),
        (
            [
                {
                    "type": "function_call",
                    "call_id": "1",
                    "name": "f",
                    "arguments": "{}",
                    "id": "x",
                    "status": "completed",
                },
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "ok"}]},
                {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "raw"},
            ],
            '{"type":"function_call","name":"f","call_id":"1","arguments":"{}"}\n'
            '{"type":"function_call_output","call_id":"1","output":"ok"}\n'
            '{"type":"custom_tool_call","name":"g","call_id":"2","input":"raw"}\n',
        ),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "phase": "final_answer"}],
            '{"role":"assistant","content":"no"}\n',
        ),
    ],
)
def test_the_input_is_shown_as_it_is_or_as_lines_of_json(given: Any, shown: str):
    assert prompt_of("/v1/decisions", input=given) == shown


@pytest.mark.parametrize(("state", "shown"), [("s", "s"), ({"a": [1, "ü"]}, '{"a":[1,"ü"]}'), ([], "[]"), (0, "0")])
def test_a_state_is_shown_as_it_is_or_as_json(state: Any, shown: str):
    assert prompt_of("/v1/systemone", state=state) == shown


def test_reasoning_is_closed_before_the_answer():
    with fake_server(tokenizer=TemplateTokenizer(R1)) as server:
        requests: list[Any] = []
        open_feed = server.engine.open
        server.engine.open = lambda given: (requests.extend(given), open_feed(given))[1]  # type: ignore[method-assign]
        decided(server)
    text = bytes(requests[0].prompt_ids).decode()
    assert text.endswith("assistant: <think>\n\n</think>\n\nyes")


def test_special_tokens_in_inputs_and_labels_are_text(server: FakeServer):
    def count(text: str) -> int:
        choices = [{"value": text}, {"value": "b"}]
        question = {"type": "choice", "instructions": text, "choices": choices}
        answer = decided(server, input=text, questions=[question])
        assert [each["value"] for each in answer["answers"][0]["probabilities"]] == [text, "b"]
        tokens: int = answer["usage"]["input_tokens"]
        return tokens

    assert count("<|end|>") == count("x" * 7)


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "box", "instructions": "?"}]}, "questions[0].type: invalid value 'box'"),
        ({"questions": [{"instructions": "?"}]}, "questions"),
        ({"questions": [{"type": "predicate"}]}, "instructions"),
        (
            {"questions": [PREDICATE, {**PREDICATE, "instructions": " "}]},
            "questions[1].instructions: must not be empty",
        ),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]}, "choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": 2}]}]}, "value"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}]}]},
            "questions[0].choices[2].value: 'a' is there twice",
        ),
        (
            {"questions": [{**SCORE, "levels": [{"label": "a"}, {"label": "a"}]}]},
            "questions[0].levels[1].label: 'a' is there twice",
        ),
        (
            {"questions": [{**CHOICE, "choices": [{"value": f"{i:03}"} for i in range(255)]}] * 9},
            "questions: have 2295 possible answers together; at most 2048 are judged",
        ),
        (
            {"questions": [{**PREDICATE, "instructions": [{"type": "input_image", "image_url": PNG}]}]},
            "questions[0].instructions: must not have images; give them in the input",
        ),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"content": "x"}, {"role": "user", "content": "y"}]}, "input[0].role: is required"),
        ({"input": [{"role": "critic", "content": "x"}]}, "role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0].type: must be a text, JSON or image part; 'input_audio' is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text: is required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]},
            "input[0].content[0].image_url: the model 'mock' takes no images",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id: is not supported: no files are kept; give image_url",
        ),
        ({"input": "x" * 5000}, "your input resulted in at least"),
        ({"questions": [{**PREDICATE, "instructions": "x" * 5000}]}, "questions[0]"),
        ({"questions": [{**CHOICE, "choices": [{"value": "x" * 5000}, {"value": "b"}]}]}, "questions[0]"),
        ({"stream": True}, "stream: is not supported: the answers come together"),
        ({"priority": 9}, "priority"),
    ],
)
def test_what_cannot_be_decided_is_refused_by_name(server: FakeServer, fields: dict[str, Any], problem: str):
    assert problem in refused(server, "/v1/decisions", {"input": "x", "questions": [PREDICATE], **fields})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"state": None}, "state: is required"),
        ({"questions": {}}, "questions"),
        ({"questions": [NOUL]}, "questions"),
        ({"questions": {f"q{i}": NOUL for i in range(401)}}, "questions"),
        (
            {"questions": {"p": NOUL, "q": {"type": "box", "instructions": "?"}}},
            "questions.q.type: invalid value 'box'",
        ),
        ({"questions": {"p": NOUL, "q": "what?"}}, "questions.q: expected `object`, got `str`"),
        ({"questions": {"q": {"type": "noul"}}}, "questions.q.instructions: is required, or criteria are"),
        ({"questions": {"q": {**NOUL, "criteria": {"maybe": "x"}}}}, "maybe"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "criteria"),
        ({"questions": {"q": {"type": "score", "criteria": []}}}, "criteria"),
        ({"questions": {"q": {"type": "score", "criteria": {"a": 1}}}}, "criteria"),
        ({"temperature": 0}, "temperature"),
        ({"images": ["ftp://x"]}, "images[0]"),
        ({"images": [PNG]}, "images[0]: the model 'mock' takes no images"),
        ({"images": [{"base64": "cG5n", "content_type": "image/png"}]}, "images[0].base64: the model 'mock' takes no"),
        (
            {"state": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
            "state[0].content[0].image_url: the model 'mock' takes no images",
        ),
        (
            {"state": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PNG}]}]}},
            "state.messages[0].content[0].image_url: the model 'mock' takes no images",
        ),
        ({"videos": ["x"]}, "videos: is not supported; give images, and text in the state"),
        ({"audio": ["x"]}, "audio: is not supported"),
        ({"stream": True}, "stream: is not supported: the answers come together"),
    ],
)
def test_what_systemone_cannot_decide_is_refused_by_name(server: FakeServer, fields: dict[str, Any], problem: str):
    assert problem in refused(server, "/v1/systemone", {"state": "x", "questions": {"q": NOUL}, **fields})


def test_the_tokens_of_all_answers_are_bounded_together(server: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asking, "MAX_SCORED_TOKENS", 2000)
    body = {"input": "x" * 500, "questions": [PREDICATE]}
    assert server.post("/v1/decisions", body).status_code == 200
    message = refused(server, "/v1/decisions", {**body, "questions": [PREDICATE] * 2})
    assert message == "questions: have more than 2000 tokens in all their answers, each with the input before it"


def test_as_many_questions_as_openai_takes_are_read():
    body = {"input": "x", "questions": [PREDICATE] * 400}
    assert len(msgspec.json.decode(msgspec.json.encode(body), type=DecisionsBody).asked()) == 400


def test_a_body_that_is_parsed_elsewhere_is_answered_alike(server: FakeServer):
    questions = [{**PREDICATE, "name": str(i), "instructions": f"Is it {i}?"} for i in range(9)]
    few = decided(server, questions=questions)
    many = decided(server, questions=questions, unknown="x" * INLINE_BYTES)
    assert [each["name"] for each in many["answers"]] == [str(i) for i in range(9)]
    assert many["answers"] == few["answers"]
    assert len({each["probability"] for each in many["answers"]}) > 1


def test_a_template_that_leaves_out_what_the_user_says_is_refused():
    with fake_server(tokenizer=TemplateTokenizer("hello")) as server:
        message = refused(server, "/v1/decisions", {"input": "x", "questions": [PREDICATE]})
    assert message == "model: cannot be asked: its chat template leaves out what the user says"


def test_a_model_without_a_chat_template_is_refused():
    with fake_server(tokenizer=TemplateTokenizer("{{ raise_exception('no') }}")) as server:
        message = refused(server, "/v1/decisions", {"input": "x", "questions": [PREDICATE]})
    assert message.startswith("model: cannot be asked: messages: ")
