"""openai-agents: an agent calls its tool and answers with the result, by chats and by responses, whole and streamed."""

import asyncio
import os
from dataclasses import replace
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, AuthenticationError
from pydantic import BaseModel

set_tracing_disabled(True)
at = {"base_url": os.environ["BASE_URL"], "max_retries": 0}
CITIES: list[str] = []
SETTINGS = ModelSettings(temperature=0, include_usage=True, extra_body={"stop": [".", "!", "?"]})
"""Agents take an answer that is cut off for a failure, so theirs end with the first sentence."""


class Verdict(BaseModel):
    is_warm: bool


@function_tool
def temperature(city: Literal["Paris", "Rome"]) -> str:
    """Return the temperature of a city."""
    CITIES.append(city)
    return "20 degrees"


async def call_a_tool(agent: Agent, streamed: bool) -> None:
    """The first answer must call the tool; agents leave the choice to the model after it."""
    CITIES.clear()
    if streamed:
        run = Runner.run_streamed(agent, "How warm is it?", max_turns=2)
        events = {event.type async for event in run.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= events, events
    else:
        run = await Runner.run(agent, "How warm is it?", max_turns=2)
    kinds = [item.type for item in run.new_items]
    assert len(CITIES) >= 1 and kinds.count("tool_call_output_item") == len(CITIES), (CITIES, kinds)
    assert kinds[0] == "tool_call_item" and kinds[-1] == "message_output_item", kinds
    assert len(run.raw_responses) == 2 and run.final_output, run.raw_responses
    used = run.context_wrapper.usage
    assert used.requests == 2 and used.total_tokens == used.input_tokens + used.output_tokens > 0, used


async def main() -> None:
    client = AsyncOpenAI(api_key=os.environ["API_KEY"], **at)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind("test", client)
        required = replace(SETTINGS, tool_choice="required", parallel_tool_calls=False)
        agent = Agent("a", instructions="Be brief.", model=model, tools=[temperature], model_settings=required)
        await call_a_tool(agent, streamed=False)
        await call_a_tool(agent, streamed=True)

        named = agent.clone(model_settings=replace(SETTINGS, tool_choice="temperature"))
        await call_a_tool(named, streamed=False)

        judge = Agent("b", model=model, output_type=Verdict, model_settings=SETTINGS)
        assert isinstance((await Runner.run(judge, "Is it warm?")).final_output, Verdict)

        careful = agent.clone(output_type=Verdict)  # its second answer may be calls, or has the form
        assert isinstance((await Runner.run(careful, "Is it warm?", max_turns=5)).final_output, Verdict)

        stranger = Agent("c", model=kind("test", AsyncOpenAI(api_key="another-key", **at)))
        try:
            await Runner.run(stranger, "Say hello.")
        except AuthenticationError as refused:
            assert refused.code == "invalid_api_key"
        else:
            raise AssertionError("a wrong key was let in")


asyncio.run(main())
