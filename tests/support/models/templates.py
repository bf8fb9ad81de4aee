"""Chat templates in the forms that real models use, on the fake model's tokenizer."""

from typing import Any, ClassVar

from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.rank.fake import ByteTokenizer

HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": <name>, "arguments": <object>}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}

{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
QWEN_CODER = HERMES.replace("Answer with <tool_call>", "Answer with <tool_call><function=name><parameter=p>")
LLAMA3 = """{{ tools | tojson }} <|python_tag|> {% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
_NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
QWEN3 = HERMES.replace("assistant: {% endif %}", "assistant: " + _NO_THINKING + "{% endif %}")
R1 = HERMES.replace("assistant: {% endif %}", "assistant: <think>\n{% endif %}") + "{# </think> #}"


class TemplateTokenizer(ByteTokenizer):
    """The fake model's tokenizer with a chat template; "" means the base class's template."""

    rendered: ClassVar[list[str]] = []  # results of apply_chat_template, latest last

    def __init__(self, template: str) -> None:
        self._templates = ChatTemplates({"default": template} if template else {}, {})

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        if not self.chat_template():
            text = super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        else:
            text = self._templates.apply(messages, tools, add_generation_prompt, **kwargs)
        self.rendered.append(text)
        return text

    def chat_template(self, has_tools: bool = False) -> str:
        return self._templates.source(has_tools)
