"""Small tokenizers with chat templates in the style of models that call tools, and servers around them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flyball_runtime.api import ApiSettings, MetricsCollector, create_app
from flyball_runtime.api.answers import ChatAnswer, ChatChunk
from flyball_runtime.grammar.checker import GrammarChecker
from runtime.api.support import MODEL, asgi_client, encode, is_a, served, sse_events
from runtime.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"

QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    "Answer with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{% if tools %}Answer with {'name': function, 'parameters': arguments}.{% for tool in tools %}{{ tool | tojson(indent=4) }}"
    "{% endfor %}{% endif %}{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids must have nine letters and digits') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}]</s>{% elif message.role == 'tool' %}"
    "[TOOL_RESULTS]{{ message.tool_call_id }}{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
SPECIAL = {
    "qwen": ["<|im_end|>", "<|im_start|>"],
    "llama": ["<|eot_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"],
}
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}

ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'
CALLS = {
    "qwen": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}


def styled(style: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of the style."""
    backend = Tokenizer(models.BPE({char: at for at, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = SPECIAL[style]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


class Chats:
    """A server of a model in one style, whose next outputs are ``outputs`` (the last again and again)."""

    def __init__(
        self, style: str, metrics: MetricsCollector, grammars: GrammarChecker | None = None, **settings: Any
    ) -> None:
        self.tokenizer = styled(style)
        self.outputs = [CALLS[style]]
        self.engine = FakeEngine(len(self.tokenizer), self._reply)
        self.engine.engine_info = type(self.engine.engine_info)(
            **{name: getattr(self.engine.engine_info, name) for name in self.engine.engine_info.__struct_fields__}
            | {"max_model_len": 1 << 20}
        )
        api = ApiSettings(served_model_names=(MODEL,), **settings)
        self.app = create_app(self.engine, self.tokenizer, api, metrics, grammars=grammars)
        self.client = asgi_client(self.app)

    def _reply(self, request: object) -> list[int]:
        output = self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        return [*encode(self.tokenizer, output), self.tokenizer.eos_token_id]

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER, TIME]} | fields
        return await self.client.post(CHAT, json={name: value for name, value in body.items() if value is not ...})

    async def answer(self, **fields: Any) -> dict[str, Any]:
        """The first choice, with the message also as a stream has it."""
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        is_a(ChatAnswer, response.json())
        choice: dict[str, Any] = response.json()["choices"][0]
        *events, _ = sse_events((await self.post(**fields, stream=True)).text)
        for event in events:
            is_a(ChatChunk, event)
        streamed, reason = joined(events)
        assert without_ids(streamed) == without_ids(choice["message"])
        assert reason == choice["finish_reason"]
        return choice

    def prompt(self) -> str:
        ids = self.engine.requests[-1].prompt_token_ids
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


def joined(events: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that the deltas of a stream add up to, and the reason for its end."""
    message: dict[str, Any] = {"content": "", "refusal": None}
    reason = None
    for event in events:
        for choice in [] if event == "[DONE]" else event["choices"]:
            reason = choice["finish_reason"] or reason
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    add_call(message.setdefault("tool_calls", []), *value)
                elif name == "role":
                    message["role"] = value
                else:
                    message[name] = message.get(name, "") + value
    if "tool_calls" in message or "reasoning" in message:
        message["content"] = message["content"] or None
    return message, reason


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    index = delta.pop("index")
    if index == len(calls):
        assert delta["id"] and delta["type"] == "function" and delta["function"]["name"]
        calls.append(delta)
    else:
        assert index == len(calls) - 1 and list(delta) == ["function"]
        calls[index]["function"]["arguments"] += delta["function"]["arguments"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": len(call["id"])} for call in message.get("tool_calls", [])]
    return message | {"tool_calls": calls}


@asynccontextmanager
async def openai_client(chats: Chats) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(chats.app) as (host, port):
        client = openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=60)
        async with client:
            yield client
