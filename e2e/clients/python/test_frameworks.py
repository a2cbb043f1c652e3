"""LlamaIndex, LiteLLM and instructor."""

import json
import os
import unittest
from typing import Literal

# It asks its home for prices otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import instructor
import litellm
from anthropic import Anthropic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from common import BASE, GREETING, KEY, MODEL, V1, WEATHER


class City(BaseModel):
    """A city."""

    # A small model would go on with properties of its own.
    model_config = ConfigDict(extra="forbid")

    name: Literal["Seoul", "Rome"]
    coast: bool


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return WEATHER.result


class LlamaIndex(unittest.TestCase):
    LLM = OpenAILike(
        model=MODEL, api_base=V1, api_key=KEY, temperature=0, max_tokens=64, context_window=2048,
        is_chat_model=True, is_function_calling_model=True, max_retries=0,
    )

    def test_chats_and_texts(self):
        messages = [ChatMessage(role="user", content=GREETING)]
        said = self.LLM.chat(messages).message.content
        self.assertTrue(said)
        self.assertEqual("".join(piece.delta or "" for piece in self.LLM.stream_chat(messages)), said)
        self.assertEqual(self.LLM.complete(GREETING).text, said)

    def test_tools_are_called(self):
        tool = FunctionTool.from_defaults(get_weather)
        response = self.LLM.chat_with_tools([tool], user_msg=WEATHER.text)
        [call] = self.LLM.get_tool_calls_from_response(response)
        self.assertEqual((call.tool_name, call.tool_kwargs), (WEATHER.name, WEATHER.arguments))

    def test_answers_have_the_form_of_a_model(self):
        answer = self.LLM.as_structured_llm(City).complete("Name a city.")
        self.assertIsInstance(answer.raw, City)


class LiteLLM(unittest.TestCase):
    WAYS = [
        {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY},
        {"model": f"hosted_vllm/{MODEL}", "api_base": V1, "api_key": KEY},
        {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": KEY},
    ]

    def test_chats(self):
        for way in self.WAYS:
            given = way | {"messages": [{"role": "user", "content": GREETING}], "temperature": 0, "max_tokens": 64}
            said = litellm.completion(**given).choices[0].message.content
            self.assertTrue(said)
            pieces = litellm.completion(**given, stream=True)
            self.assertEqual("".join(piece.choices[0].delta.content or "" for piece in pieces), said)

    def test_tools_are_called(self):
        for way in self.WAYS:
            answer = litellm.completion(
                **way, messages=[{"role": "user", "content": WEATHER.text}], tools=WEATHER.tools, temperature=0, max_tokens=64
            )
            [call] = answer.choices[0].message.tool_calls
            self.assertEqual((call.function.name, json.loads(call.function.arguments)), (WEATHER.name, WEATHER.arguments))

    def test_errors_are_known(self):
        with self.assertRaises(litellm.ContextWindowExceededError):
            litellm.completion(**self.WAYS[0], messages=[{"role": "user", "content": "word " * 30_000}])
        with self.assertRaises(litellm.AuthenticationError):
            litellm.completion(**self.WAYS[0] | {"api_key": "wrong"}, messages=[{"role": "user", "content": GREETING}])


class Instructor(unittest.TestCase):
    def test_answers_have_the_form_of_a_model(self):
        client = OpenAI(base_url=V1, api_key=KEY)
        for mode in [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]:
            asks = instructor.from_openai(client, mode=mode)
            messages = [{"role": "user", "content": "Name a city."}]
            city = asks.chat.completions.create(model=MODEL, response_model=City, messages=messages, max_tokens=64, temperature=0)
            self.assertIsInstance(city, City, mode)
        asks = instructor.from_anthropic(Anthropic(base_url=BASE, api_key=KEY))
        city = asks.messages.create(model=MODEL, response_model=City, messages=messages, max_tokens=64)
        self.assertIsInstance(city, City)


if __name__ == "__main__":
    unittest.main()
