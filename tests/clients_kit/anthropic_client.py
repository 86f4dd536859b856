"""anthropic: messages whole and streamed, a conversation, a forced tool, stop sequences, the token count, and typed errors."""

import os

import anthropic

ROOT = os.environ["BASE_URL"].removesuffix("/v1")
client = anthropic.Anthropic(base_url=ROOT, api_key=os.environ["API_KEY"], max_retries=0)
ask = {"model": "test", "max_tokens": 16, "messages": [{"role": "user", "content": "Say hello."}]}
greedy = ask | {"extra_body": {"temperature": 0}}

whole = client.messages.create(system="Be brief.", **greedy)
(text,) = whole.content
assert text.type == "text" and text.text, whole
assert whole.stop_reason in ("end_turn", "max_tokens") and 0 < whole.usage.output_tokens <= 16, whole

with client.messages.stream(system="Be brief.", **greedy) as stream:
    assert "".join(stream.text_stream) == text.text
    final = stream.get_final_message()
assert (final.content[0].text, final.stop_reason) == (text.text, whole.stop_reason), final
assert final.usage.output_tokens == whole.usage.output_tokens, final

turns = [*ask["messages"], whole.to_param(), {"role": "user", "content": "Again."}]
assert client.messages.create(model="test", max_tokens=8, messages=turns).usage.output_tokens

counted = client.messages.count_tokens(model="test", system="Be brief.", messages=ask["messages"])
cached = whole.usage.cache_read_input_tokens or 0
assert counted.input_tokens == whole.usage.input_tokens + cached, (counted, whole.usage)

stop = text.text[1:3]
stopped = client.messages.create(system="Be brief.", stop_sequences=[stop], **greedy)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), stopped

schema = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
tools = [{"name": "valve", "description": "Opens the valve.", "input_schema": schema}]
forced = ask | {"tools": tools, "tool_choice": {"type": "tool", "name": "valve"}, "max_tokens": 40}
called = client.messages.create(**forced)
(call,) = called.content
assert call.type == "tool_use" and isinstance(call.input["on"], bool) and called.stop_reason == "tool_use", called
with client.messages.stream(**forced) as stream:
    assert stream.get_final_message().content[0].input.keys() == {"on"}

for error, wrong in (
    (anthropic.BadRequestError, {"stop_sequences": [""]}),
    (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    (anthropic.NotFoundError, {"model": "another"}),
):
    try:
        client.messages.create(**(ask | wrong))
    except error as refused:
        assert refused.body["type"] == "error" and refused.body["error"]["message"], refused.body
    else:
        raise AssertionError(f"{wrong} was accepted")

try:
    anthropic.Anthropic(base_url=ROOT, api_key="another-key", max_retries=0).messages.create(**ask)
except anthropic.AuthenticationError as refused:
    assert refused.body["error"]["type"] == "authentication_error", refused.body
else:
    raise AssertionError("a wrong key was let in")
