"""What chat templates may do beyond reading: change a list, and read JSON."""

import copy
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest
from kvloom.engine.text.chat_template import ChatTemplates


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplates({"default": template}, {}).apply(messages, None, True)


def test_a_template_appends_to_a_list_of_its_own():
    loop = "{% for m in messages %}{% set _ = own.append(m.content) %}{% endfor %}"
    template = "{% set own = [] %}" + loop + "{{ own | join('+') }}"
    assert rendered(template, [{"role": "user", "content": text} for text in "ab"]) == "a+b"


def test_a_template_takes_items_from_a_list_of_its_own():
    template = (
        "{% set own = [] %}{% for m in messages %}{% set _ = own.append(m.content) %}{% endfor %}{{ own.pop(0) }}"
    )
    assert rendered(template, [{"role": "user", "content": text} for text in "ab"]) == "a"
    messages = [{"role": "user", "content": ["a"]}]
    assert rendered("{{ messages[0].content.pop() }}", messages) == "a"
    assert messages == [{"role": "user", "content": ["a"]}]


def test_a_list_of_the_request_stays_as_it_is():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = copy.deepcopy(messages)
    assert rendered("{% set _ = messages[0].content.append(1) %}{{ messages[0].content | length }}", messages) == "2"
    assert messages == before


@pytest.mark.parametrize("change", ["clear()", "extend([1])", "sort()"])
def test_no_list_is_changed_otherwise(change: str):
    with pytest.raises(BadRequest, match="is unsafe"):
        rendered(f"{{% set own = [1] %}}{{{{ own.{change} }}}}", [{"role": "user", "content": ""}])


def test_a_template_that_wants_a_list_of_tools_gets_an_empty_one():
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}"
    assert rendered(template, [{"role": "user", "content": "a"}]) == "a"
    assert rendered("{{ tools is none }}", [{"role": "user", "content": ""}]) == "True"


def test_what_a_filter_gives_becomes_json():
    messages = [{"role": "user", "content": "a"}]
    assert rendered("{{ messages | map(attribute='content') | tojson }}", messages) == '["a"]'
    with pytest.raises(BadRequest, match="Undefined is no JSON"):
        rendered("{{ nothing | tojson }}", messages)


def test_a_template_reads_json():
    assert rendered("{{ (messages[0].content | from_json).a }}", [{"role": "user", "content": '{"a": 7}'}]) == "7"
    with pytest.raises(BadRequest, match="refuses them"):
        rendered("{{ messages[0].content | from_json }}", [{"role": "user", "content": "{"}])
