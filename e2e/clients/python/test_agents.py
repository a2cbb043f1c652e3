"""OpenAI's library for agents, which speaks the Responses API."""

import asyncio
import unittest

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from common import GREETING, KEY, MODEL, STORING, V1, WEATHER

set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return WEATHER.result


class Agents(unittest.TestCase):
    def agent(self, url=V1):
        model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key=KEY))
        settings = ModelSettings(temperature=0, max_tokens=64)
        return Agent(name="weather", model=model, model_settings=settings, tools=[get_weather])

    def test_an_agent_runs_its_tools_until_there_is_an_answer(self):
        self.assertEqual(asyncio.run(Runner.run(self.agent(), WEATHER.text)).final_output, WEATHER.answer)

    def test_and_does_so_in_pieces(self):
        async def run():
            result = Runner.run_streamed(self.agent(), WEATHER.text)
            kinds = [event.type async for event in result.stream_events()]
            return kinds, result.final_output

        kinds, answer = asyncio.run(run())
        self.assertIn("run_item_stream_event", kinds)
        self.assertEqual(answer, WEATHER.answer)

    def test_an_agent_goes_on_from_what_the_server_kept(self):
        async def run():
            agent = self.agent(f"{STORING}/v1")
            first = await Runner.run(agent, WEATHER.text, auto_previous_response_id=True)
            second = await Runner.run(agent, GREETING, previous_response_id=first.last_response_id)
            return first.final_output, second.final_output

        first, second = asyncio.run(run())
        self.assertEqual(first, WEATHER.answer)
        self.assertTrue(second)


if __name__ == "__main__":
    unittest.main()
