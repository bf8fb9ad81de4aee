"""Images in every dialect that accepts them, over vLLM; invalid images are refused by name."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.images import animated, data_url, huge_png, in_base64, png
from tests.support.models.byte_folder import make_byte_folder
from tests.support.processes import CLI, ServeProcess, serving
from tests.support.servers import fake_server

FAKE = Path(__file__).resolve().parents[2] / "support/vllm/fake"
SOURCE = Path(__file__).resolve().parents[3] / "src"
WAIT_S = 120.0
IMAGE_TOKENS = 4  # images of 16 x 16 pixels, as the fake expects
RED, BLUE = png("red"), png("blue")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("vision")
    model = make_byte_folder(folder / "model", max_position_embeddings=2048)
    flags = ["--response-store", str(folder / "kept"), "--allowed-image-host", "images.invalid"]
    command = [*CLI, "serve", str(model), "--backend", "vllm", "--served-model-name", "m", "--port", "0", *flags]
    with serving(command, PYTHONPATH=f"{FAKE}:{SOURCE}", FAKE_VLLM_SEES="1") as running:
        yield running


def post(server: ServeProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": "m", **body}, timeout=WAIT_S)


def image(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, kind), "detail": "auto"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(server: ServeProcess, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "max_tokens": 12, "temperature": 0, **more}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def prompt_of(server: ServeProcess, *messages: dict[str, Any]) -> list[int]:
    body = {"model": "m", "messages": list(messages)}
    return httpx.post(server.url + "/tokenize", json=body, timeout=WAIT_S).json()["tokens"]


def test_another_image_has_another_answer_and_the_same_one_the_same(server):
    first, again, other = (said(chat(server, user(image(data), text("What?")))) for data in (RED, RED, BLUE))
    assert first == again
    assert first != other


def test_images_stand_where_they_were_put_and_count_as_the_engine_counts_them(server):
    told = prompt_of(server, user(text("a"), image(RED), text("b")), user(image(png(size=(24, 16))), text("c")))
    assert bytes(told) == b"<user>a\n\x02\x02\x02\x02\nb\n<user>\x02\x02\x02\x02\x02\x02\nc\n<assistant>"
    asked = user(text("a"), image(RED))
    usage = chat(server, asked)["usage"]
    told = prompt_of(server, asked)
    assert bytes(told) == b"<user>a\n\x02\x02\x02\x02\n<assistant>"
    assert usage["prompt_tokens"] == len(told)


def test_the_same_image_has_the_same_answer_in_every_dialect(server):
    whole = said(chat(server, user(image(RED), text("What?"))))
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(RED)}
    turn = user({"type": "image", "source": source}, text("What?"))
    message = post(server, "/v1/messages", {"messages": [turn], "max_tokens": 12, "temperature": 0}).json()
    assert message["content"][0]["text"] == whole
    counted = post(server, "/v1/messages/count_tokens", {"messages": [turn]}).json()
    assert counted["input_tokens"] == message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    item = user({"type": "input_image", "image_url": data_url(RED)}, {"type": "input_text", "text": "What?"})
    response = post(server, "/v1/responses", {"input": [item], "max_output_tokens": 16, "temperature": 0}).json()
    assert response["output"][0]["content"][0]["text"].startswith(whole)
    asked = {"role": "user", "content": "What?", "images": [in_base64(RED)]}
    options = {"num_predict": 12, "temperature": 0}
    ollama = post(server, "/api/chat", {"messages": [asked], "stream": False, "options": options}).json()
    assert ollama["message"]["content"] == whole
    generate = {"prompt": "What?", "images": [in_base64(RED)], "stream": False, "options": options}
    answer = post(server, "/api/generate", generate).json()
    assert answer["response"] == whole
    assert "context" not in answer
    shown = httpx.post(server.url + "/api/show", json={"model": "m"}).json()
    assert "vision" in shown["capabilities"]


def test_a_kept_response_with_an_image_is_gone_on_with(server):
    item = user({"type": "input_image", "image_url": data_url(RED)}, {"type": "input_text", "text": "What?"})
    first = post(server, "/v1/responses", {"input": [item], "max_output_tokens": 16, "temperature": 0}).json()
    more = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 16, "temperature": 0}
    answer = post(server, "/v1/responses", more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"] + IMAGE_TOKENS


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"n": 3, "seed": 1, "temperature": 0.9}, lambda found: len({c["message"]["content"] for c in found}) == 3),
        ({"logprobs": True, "top_logprobs": 1}, lambda found: len(found[0]["logprobs"]["content"]) == 12),
        ({"response_format": SCHEMA}, lambda found: found[0]["message"]["content"] == '{"ok": 1}'),
        ({"tools": [TOOL]}, lambda found: found[0]["finish_reason"] == "length"),
        ({"stop": [" ", "a"]}, lambda found: not {" ", "a"} & set(found[0]["message"]["content"])),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_chat_may_ask_goes_with_images(server, fields, holds):
    assert holds(chat(server, user(image(RED), text("What?")), **fields)["choices"])


def test_prompt_logprobs_are_told_of_image_tokens_too(server):
    answer = chat(server, user(image(RED)), prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_a_large_image_is_read_elsewhere_and_streamed_as_it_is_whole(server):
    data = os.urandom(40_000)  # after the image's end, where no decoder reads
    messages = [user(image(RED + data), text("What?"))]
    whole = said(chat(server, *messages))
    assert whole == said(chat(server, user(image(RED), text("What?"))))
    body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=WAIT_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines) == whole


def test_the_result_of_a_tool_may_be_an_image(server):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [user(text("What?")), {"role": "assistant", "content": None, "tool_calls": [call]}]
    results = [{"role": "tool", "tool_call_id": "c1", "content": [image(data), text("seen")]} for data in (RED, BLUE)]
    first, other = (said(chat(server, *asked, result, tools=[TOOL])) for result in results)
    assert first != other
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(RED)}}
    used = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": [used]},
        user({"type": "tool_result", "tool_use_id": "c1", "content": [block, text("seen")]}),
    ]
    answer = post(server, "/v1/messages", {"messages": turns, "max_tokens": 5})
    assert answer.status_code == 200, answer.text


def test_an_answer_goes_on_when_the_process_is_killed_and_its_images_travel_again(server):
    messages = [user(image(RED), text("What?"))]
    whole = said(chat(server, *messages, max_tokens=400))
    body = {"model": "m", "messages": messages, "max_tokens": 400, "temperature": 0, "stream": True}
    told, is_killed = "", False
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=WAIT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                told += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(told) > 40 and not is_killed:
                os.kill(server.rank_pid(), signal.SIGKILL)
                is_killed = True
    assert is_killed
    assert told == whole


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
BAD = [
    (data_url(RED[:40]), "is no PNG, JPEG, WebP or GIF image, or a damaged one"),
    (data_url(png(size=(300, 300))[:120]), "cannot be decoded: its file is damaged or cut short"),
    (data_url(huge_png()), "pixels"),
    (data_url(png(kind="GIF")), "is declared as image/png, but is image/gif"),
    (data_url(animated(), "image/gif"), "is animated"),
    (data_url(SVG, "image/svg+xml"), "is declared as 'image/svg+xml'; must be one of image/png"),
    (data_url(SVG), "is no PNG, JPEG, WebP or GIF image"),
    (data_url(b"<html></html>", "text/html"), "is declared as 'text/html'"),
    ("data:image/png;base64,!!!!", "is not valid base64"),
    ("data:image/png;base64,", "is empty"),
    ("data:image/png,abc", "must be of the form data:image/png;base64,..."),
    ("file:///etc/passwd", "must be a data: URL with an image in base64, or an http or https URL"),
    ("http://localhost/a.png", "is not fetched: the host 'localhost' is none that this server fetches images from"),
    ("http://user:x@images.invalid/a.png", "must not hold a user name or a password"),
    ("https://images.invalid/a.png", "cannot be fetched: the host 'images.invalid' is not known"),
]


@pytest.mark.parametrize(("url", "problem"), BAD, ids=[problem[:40] for _, problem in BAD])
def test_what_is_no_image_is_refused_by_the_name_of_its_part(server, url, problem):
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = post(server, "/v1/chat/completions", {"messages": [user(text("What?"), part)]})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith("messages[0].content[1].image_url.url: ")
    assert problem in error["message"]
    assert error["param"] == "messages[0].content[1].image_url.url"


def test_an_image_of_one_pixel_is_one(server):
    assert chat(server, user(image(png(size=(1, 1))), text("What?")))["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/v1/chat/completions", {"messages": [user(*[image(RED)] * 65)]}, "is one more than the 64 images"),
        ("/v1/chat/completions", {"messages": [user(*[image(RED)] * 4)]}, "At most 3 image(s) may be provided"),
        ("/v1/chat/completions", {"messages": [user({"type": "input_audio"})]}, "'input_audio' is not supported"),
        ("/v1/chat/completions", {"messages": [user({"type": "image_url"})]}, "image_url: is required"),
        (
            "/v1/messages",
            {"messages": [user({"type": "image", "source": {"type": "file"}})], "max_tokens": 1},
            "'file'",
        ),
        ("/v1/messages", {"messages": [user({"type": "image"})], "max_tokens": 1}, "content[0].source: is required"),
        ("/v1/responses", {"input": [user({"type": "input_image", "file_id": "f"})]}, "file_id: is not supported"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["??"]}]}, "images[0]: is not valid base64"),
        (
            "/api/generate",
            {"prompt": "a", "raw": True, "images": [in_base64(RED)]},
            "images: is not supported with raw",
        ),
        ("/api/generate", {"prompt": "a", "context": [1], "images": [in_base64(RED)]}, "context: does not go with"),
    ],
)
def test_what_does_not_go_is_refused_by_name(server, path, body, problem):
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    assert problem in answer.text


def test_a_prompt_that_is_too_long_with_its_images_says_how_long_it_is(server):
    answer = post(server, "/v1/chat/completions", {"messages": [user(image(png(size=(800, 800))))]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


REFUSING = [
    ("/v1/chat/completions", {"messages": [user(text("a"), image(RED))]}, "messages[0].content[1].image_url.url: "),
    ("/tokenize", {"messages": [user(image(RED))]}, "messages[0].content[0].image_url.url: "),
    ("/api/generate", {"model": "mock", "prompt": "a", "images": [in_base64(RED)]}, "images[0]: "),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSING)
def test_a_model_that_sees_nothing_refuses_images_by_name(path, body, field):
    with fake_server() as server:
        answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 400
    assert f"{field}the model 'mock' takes no images" in answer.text


QUESTION = {"type": "choice", "name": "colour", "choices": [{"value": "red"}, {"value": "blue"}]}


def decided(server: ServeProcess, data: bytes) -> dict[str, Any]:
    item = user({"type": "input_text", "text": "See."}, {"type": "input_image", "image_url": data_url(data)})
    asked = {"input": [item], "questions": [{**QUESTION, "instructions": "Which colour?"}]}
    answer = post(server, "/v1/decisions", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_decisions_see_images(server):
    red, again, blue = decided(server, RED), decided(server, RED), decided(server, BLUE)
    assert red["answers"] == again["answers"]
    assert red["answers"] != blue["answers"]
    [answer] = red["answers"]
    assert (answer["name"], sum(one["probability"] for one in answer["probabilities"])) == ("colour", pytest.approx(1))


def test_systemone_sees_images(server):
    question = {"colour": {"type": "choice", "instructions": "Which colour?", "criteria": {"red": None, "blue": None}}}
    found = []
    for data in (RED, BLUE):
        for given in (data_url(data), {"base64": in_base64(data), "content_type": "image/png"}):
            answer = post(server, "/v1/systemone", {"state": "See.", "images": [given], "questions": question})
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["answers"])
    assert found[0] == found[1] != found[2] == found[3]
