"""OpenAI's own client: models, chats and completions whole and streamed, their helpers, logprobs, and typed errors."""

import os

import openai

at = {"base_url": os.environ["BASE_URL"], "max_retries": 0}
client = openai.OpenAI(api_key=os.environ["API_KEY"], **at)
ask = {"model": "test", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}

assert [model.id for model in client.models.list()] == ["test", "accent"]
assert client.models.retrieve("test").id == "test"

raw = client.chat.completions.with_raw_response.create(**ask)
assert raw.headers["x-request-id"]
whole = raw.parse()
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

adapted = client.chat.completions.create(**ask | {"model": "accent"})
assert adapted.model == "accent" and adapted.choices[0].message.content != whole.choices[0].message.content

chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

with client.chat.completions.stream(**ask | {"max_tokens": 200}) as stream:
    stream.until_done()
    assert (stream.get_final_completion().choices[0].message.content or "").startswith(text)

likely = client.chat.completions.create(logprobs=True, top_logprobs=3, **ask).choices[0].logprobs.content
assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob for entry in likely)

several = client.completions.create(model="test", prompt=["One, two,", "Red,"], n=2, max_tokens=4, logprobs=1, seed=1)
assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
assert "".join(
    part.choices[0].text for part in client.completions.create(model="test", prompt="One,", temperature=0, stream=True)
)

answer = client.responses.create(model="test", input="Say hello.", max_output_tokens=16, temperature=0, store=False)
assert answer.status in ("completed", "incomplete") and answer.output_text.startswith(text[:4]), answer
with client.responses.stream(model="test", input="Say hello.", temperature=0, store=False) as events:
    events.until_done()
    assert events.get_final_response().output_text.startswith(answer.output_text)

packed = client.embeddings.create(model="test", input=["One, two,", "Red,"])
plain = client.embeddings.create(model="test", input=["One, two,", "Red,"], encoding_format="float")
for one, other in zip(packed.data, plain.data, strict=True):
    assert abs(sum(entry * entry for entry in one.embedding) - 1.0) < 1e-4
    assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-3

for error, wrong in (
    (openai.BadRequestError, {"temperature": 3}),
    (openai.NotFoundError, {"model": "another"}),
    (openai.BadRequestError, {"max_tokens": 10**6}),
):
    try:
        client.chat.completions.create(**ask | wrong)
    except error as refused:
        assert refused.code and refused.param and refused.request_id, refused
    else:
        raise AssertionError(f"{wrong} was let in")
try:
    openai.OpenAI(api_key="another-key", **at).models.list()
except openai.AuthenticationError as refused:
    assert refused.code == "invalid_api_key"
else:
    raise AssertionError("a wrong key was let in")
