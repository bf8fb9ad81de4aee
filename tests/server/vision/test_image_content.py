"""Texts and images of messages, how they become a prompt, and the comparison of prompts that contain images."""

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvloom.contract.errors import BadRequest, Overloaded
from kvloom.contract.images import Image, Sight
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.server.chat.content import content_of, joined, sources_of, text_of, with_parts, with_texts
from kvloom.server.chat.style import takes_parts
from kvloom.server.chat.tool_prompt import with_tools_in_text
from kvloom.server.serving.service import GenerationService
from kvloom.server.serving.vision import looking
from kvloom.server.serving.vision.looking import MAX_HELD_BYTES, Looking
from kvloom.server.serving.vision.seen import Look, NotSeen, Seen, seeing, seen_of
from kvloom.server.serving.vision.sources import MAX_IMAGE_BYTES, ImageSource, source_of_base64, source_of_url
from kvloom.vllm.images import MAX_ALL_PIXELS, check_image, read_images
from tests.support.images import huge_png
from tests.support.models.byte_folder import TEMPLATE, make_byte_folder
from tests.support.models.seeing_folder import TEMPLATE as PARTS_TEMPLATE
from tests.support.models.seeing_folder import make_seeing_folder

A, B = ImageSource("a", b"1"), ImageSource("b", b"2")


def test_texts_alone_are_one_and_beside_images_each_stays():
    assert content_of(["x", "y"]) == "x\ny"
    assert content_of(["x", A, "y", "z"]) == ["x", A, "y", "z"]
    assert text_of(["x", A, "y"]) == "x\ny"


@pytest.mark.parametrize(
    ("contents", "whole"),
    [
        (("a", "b"), "ab"),
        (("a", [A, "b"], "c"), ["a", A, "bc"]),
        ((["b", A], "c"), ["b", A, "c"]),
        (("", [A], ""), [A]),
        (("", ""), ""),
    ],
)
def test_contents_are_put_behind_one_another(contents, whole):
    assert joined(*contents) == whole


def test_images_keep_their_place_in_parts_and_in_texts():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": ["x", A, "y", B]}]
    assert sources_of(messages) == (A, B)
    parts = [{"type": "text", "text": "x"}, {"type": "image"}, {"type": "text", "text": "y"}, {"type": "image"}]
    assert [message["content"] for message in with_parts(messages)] == [[{"type": "text", "text": "s"}], parts]
    assert with_texts(messages, "<i>")[1]["content"] == "x\n<i>\ny\n<i>"


def test_results_of_tools_with_images_become_a_users_where_a_template_knows_no_tools():
    found = with_tools_in_text(
        [{"role": "tool", "content": ["seen", A]}, {"role": "tool", "content": [B]}, {"role": "user", "content": "x"}],
        [],
    )
    content = ["<tool_response>\nseen", A, "\n</tool_response>\n<tool_response>\n", B, "\n</tool_response>"]
    assert found[0] == {"role": "user", "content": content}


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' or 'image' in c or 'image_url' in c %}<|image_pad|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT_PARTS = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
REFUSES = (
    "{% if messages[0].content is not string %}{{ raise_exception('text only') }}{% endif %}{{ messages[0].content }}"
)


@pytest.mark.parametrize(
    ("template", "takes"),
    [(QWEN, True), (PARTS_TEMPLATE, True), (TEMPLATE, False), (TEXT_PARTS, False), (REFUSES, False)],
)
def test_whether_a_template_takes_parts_is_tried_out(template, takes, tmp_path):
    folder = make_seeing_folder(tmp_path, template)
    assert takes_parts(load_tokenizer(folder)) is takes


def test_a_template_of_none_takes_none(tmp_path: Path):
    folder = make_byte_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    assert not takes_parts(load_tokenizer(folder))


def test_a_file_that_is_too_large_is_not_decoded():
    text = "A" * (4 * (MAX_IMAGE_BYTES // 3) + 8)
    with pytest.raises(BadRequest, match="x: is larger than 20971520 bytes"):
        source_of_base64(text, "", "x")


@pytest.mark.parametrize("url", ["data:IMAGE/PNG;base64,AAAA", "data:image/png;charset=x;base64,AAAA"])
def test_a_data_url_may_say_more(url):
    assert source_of_url(url, "x") == ImageSource("x", b"\0\0\0", "image/png")


@pytest.mark.parametrize(
    "text",
    ["AAA", "AAAA=", "AA\nAA", "AA AA", "\u00e9AAA", "AA-_"],
    ids=["short", "more", "line", "space", "letter", "url"],
)
def test_base64_is_read_strictly(text):
    with pytest.raises(BadRequest, match="x: is not valid base64"):
        source_of_base64(text, "", "x")


def test_a_file_crosses_to_another_process_beside_what_is_said_of_it():
    files = list[pickle.PickleBuffer]()
    head = pickle.dumps(A, 5, buffer_callback=files.append)
    assert [bytes(each) for each in files] == [b"1"]
    assert pickle.loads(head, buffers=[bytes(each) for each in files]) == pickle.loads(pickle.dumps(A)) == A


def test_prompts_are_alike_up_to_the_first_image_where_images_differ():
    plain, seen = (1, 2, 9, 3), (1, 2, 7, 7, 7, 3, 4)
    red, blue = (Sight(plain, (Image(data),)) for data in (b"red", b"blue"))
    told = [sight.told_apart(seen) for sight in (red, blue, red)]
    assert told[0] == told[2] != told[1]
    assert [len(ids) for ids in told] == [len(seen)] * 3
    assert told[0][:1] == told[1][:1] == [1]
    assert not set(told[0][1:]) & set(told[1][1:])
    assert max(max(ids) for ids in told) < 2**63
    orders = [Sight(plain, tuple(map(Image, datas))) for datas in ((b"a", b"b"), (b"a", b"c"), (b"b", b"a"))]
    assert len({tuple(sight.told_apart(seen)) for sight in orders}) == 3, "every image counts, and where it stands"


def test_images_of_all_requests_are_bounded_until_they_are_forgotten():
    async def main() -> None:
        own = Looking()
        whole = ImageSource("i", b"\0" * MAX_IMAGE_BYTES)
        found = [await own._fetched([whole]) for _ in range(MAX_HELD_BYTES // MAX_IMAGE_BYTES)]
        with pytest.raises(Overloaded):
            await own._fetched([whole])
        own._room.give_back(found[0][1])
        await own._fetched([whole])
        with pytest.raises(BadRequest, match="i: and the other images are larger than"):
            await own._fetched([whole] * 3)

    asyncio.run(main())


def test_what_was_seen_is_for_one_body():
    look = Look(cast("GenerationService", None), (1,), ())
    seen = Seen((1, 2), Sight((1,), ()))
    with seeing(seen):
        assert seen_of(look) is seen
        with seeing(None), pytest.raises(NotSeen):
            seen_of(look)
    with pytest.raises(NotSeen):
        seen_of(look)


def test_the_pixels_of_all_images_are_bounded_before_any_is_decoded():
    images = [Image(huge_png(7000), name=f"images[{i}]") for i in range(3)]
    assert sum(map(check_image, images[:2])) <= MAX_ALL_PIXELS < sum(map(check_image, images))
    with pytest.raises(
        BadRequest, match=f"and those after it have more than {MAX_ALL_PIXELS} pixels together"
    ) as error:
        read_images(images)
    assert error.value.field == "images[0]"


def test_of_a_request_that_is_refused_no_image_is_held():
    async def main() -> None:
        own = Looking()
        sources = [ImageSource("i", b"\0" * MAX_IMAGE_BYTES), ImageSource("j", url="http://a.example/")]
        for _ in range(MAX_HELD_BYTES // MAX_IMAGE_BYTES + 1):
            with pytest.raises(BadRequest, match="j: is not fetched"):
                await own._fetched(sources)

    asyncio.run(main())


def test_an_image_is_held_for_as_long_as_somebody_knows_it(monkeypatch):
    async def looked(*_: object) -> tuple[int, ...]:
        return (1,)

    async def main() -> None:
        look = Look(awake, (1,), (ImageSource("i", b"\0" * MAX_IMAGE_BYTES),))
        own = Looking()
        known = [await own.see(look, "") for _ in range(MAX_HELD_BYTES // MAX_IMAGE_BYTES)]
        with pytest.raises(Overloaded):
            await own.see(look, "")
        known.pop()
        known.append(await own.see(look, ""))

    awake = cast("GenerationService", SimpleNamespace(sleeper=SimpleNamespace(check_awake=lambda: None)))
    monkeypatch.setattr(looking, "_looked", looked)
    asyncio.run(main())
