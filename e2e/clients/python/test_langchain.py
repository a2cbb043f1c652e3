"""LangChain, by OpenAI's protocol and by Anthropic's."""

import unittest
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

from common import BASE, EMBEDDINGS, GREETING, KEY, MODEL, V1, WEATHER

OPENAI = ChatOpenAI(base_url=V1, api_key=KEY, model=MODEL, temperature=0, max_tokens=64, max_retries=0)
RESPONSES = ChatOpenAI(
    base_url=V1, api_key=KEY, model=MODEL, temperature=0, max_tokens=64, max_retries=0, use_responses_api=True
)
ANTHROPIC = ChatAnthropic(base_url=BASE, api_key=KEY, model=MODEL, max_tokens=64, max_retries=0, top_k=1)


class City(BaseModel):
    """A city."""

    # A small model would go on with properties of its own.
    model_config = ConfigDict(extra="forbid")

    name: Literal["Seoul", "Rome"]
    coast: bool


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return WEATHER.result


class Protocols(unittest.TestCase):
    def test_whole_and_in_pieces_an_answer_is_the_same(self):
        for model in [OPENAI, RESPONSES, ANTHROPIC]:
            whole = model.invoke([SystemMessage("Be kind."), HumanMessage(GREETING)])
            pieces = list(model.stream([SystemMessage("Be kind."), HumanMessage(GREETING)]))
            self.assertTrue(whole.text)
            self.assertEqual("".join(piece.text for piece in pieces), whole.text)
            self.assertGreater(whole.usage_metadata["output_tokens"], 0)

    def test_an_agent_calls_a_tool_and_reads_its_result(self):
        for model in [OPENAI, RESPONSES, ANTHROPIC]:
            bound = model.bind_tools([get_weather])
            messages = [HumanMessage(WEATHER.text)]
            called: AIMessage = bound.invoke(messages)
            [call] = called.tool_calls
            self.assertEqual((call["name"], call["args"]), (WEATHER.name, WEATHER.arguments))
            messages += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
            self.assertEqual(bound.invoke(messages).text, WEATHER.answer)
            gathered = None
            for piece in bound.stream(messages[:1]):
                gathered = piece if gathered is None else gathered + piece
            self.assertEqual(gathered.tool_calls[0]["args"], WEATHER.arguments)

    def test_answers_have_the_form_of_a_model(self):
        for method in ["json_schema", "function_calling"]:
            for model in [OPENAI, RESPONSES]:
                self.assertIsInstance(model.with_structured_output(City, method=method).invoke("Name a city."), City)
        self.assertIsInstance(ANTHROPIC.with_structured_output(City, method="function_calling").invoke("Name a city."), City)

    def test_texts_are_embedded(self):
        texts = OpenAIEmbeddings(base_url=f"{EMBEDDINGS}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
        self.assertEqual(len(texts.embed_documents(["a boat", "a ship"])), 2)
        # By default it sends the tokens of one of OpenAI's own models, which are no others'.


if __name__ == "__main__":
    unittest.main()
