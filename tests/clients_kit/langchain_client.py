"""langchain-openai: chats whole, streamed and in a batch, logprobs, completions, and the error for a wrong key."""

import os

import openai
from langchain_openai import ChatOpenAI, OpenAI

at = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"], "model": "test", "max_retries": 0}

chat = ChatOpenAI(temperature=0, max_tokens=8, **at)
whole = chat.invoke([("system", "Be brief."), ("human", "Say hello.")])
assert whole.content and whole.usage_metadata["output_tokens"] <= 8, whole

streamed = list(chat.stream([("system", "Be brief."), ("human", "Say hello.")]))
assert "".join(str(chunk.content) for chunk in streamed) == whole.content

assert [answer.content for answer in chat.batch(["Say hello."] * 2)] == [chat.invoke("Say hello.").content] * 2

likely = chat.bind(logprobs=True, top_logprobs=2).invoke("Say hello.")
entries = likely.response_metadata["logprobs"]["content"]
assert entries and all(len(entry["top_logprobs"]) == 2 for entry in entries)

assert OpenAI(temperature=0, max_tokens=4, **at).invoke("One, two,")

try:
    ChatOpenAI(**(at | {"api_key": "another-key"})).invoke("Say hello.")
except openai.AuthenticationError as refused:
    assert refused.code == "invalid_api_key"
else:
    raise AssertionError("a wrong key was let in")
