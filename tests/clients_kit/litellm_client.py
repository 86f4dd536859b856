"""LiteLLM: chats whole and streamed, completions, the model list, and its own class of error for a wrong key."""

import os

import litellm

at = {"api_base": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"]}
ask = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}

whole = litellm.completion("openai/test", **ask, **at)
assert whole.choices[0].finish_reason in ("stop", "length"), whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = list(litellm.completion("openai/test", stream=True, stream_options={"include_usage": True}, **ask, **at))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content, (text, whole)

several = litellm.completion("openai/test", n=3, seed=1, **(ask | {"temperature": 1}), **at)
assert len(several.choices) == 3

completed = litellm.text_completion(
    prompt="One, two,", model="text-completion-openai/test", max_tokens=4, temperature=0, **at
)
assert completed.choices[0].text

hosted = litellm.completion("hosted_vllm/test", **ask, **at)
assert hosted.choices[0].message.content == text

try:
    litellm.completion("openai/test", num_retries=0, **ask, **(at | {"api_key": "another-key"}))
except litellm.AuthenticationError as refused:
    assert refused.status_code == 401
else:
    raise AssertionError("a wrong key was let in")
