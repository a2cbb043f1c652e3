"""OpenAI's client, which refuses answers that are not as its types say."""

import asyncio
import json
import time
import unittest
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from common import EMBEDDINGS, GREETING, KEY, MODEL, STORING, V1, WEATHER, questions

CLIENT = OpenAI(base_url=V1, api_key=KEY, _strict_response_validation=True, max_retries=0)
STORES = OpenAI(base_url=f"{STORING}/v1", api_key=KEY, _strict_response_validation=True, max_retries=0)
LENIENT = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
GREETS = [{"role": "user", "content": GREETING}]
ASKS = [{"role": "user", "content": WEATHER.text}]


class City(BaseModel):
    name: Literal["Seoul", "Rome"]
    size: Literal["small", "large"]
    coast: bool


class GetWeather(BaseModel):
    """Get the current weather in a city"""

    city: str


def chat(**given):
    return CLIENT.chat.completions.create(**{"model": MODEL, "temperature": 0, "max_tokens": 64, "messages": GREETS} | given)


class Chats(unittest.TestCase):
    def test_whole_and_in_pieces_an_answer_is_the_same(self):
        whole = chat(seed=1)
        pieces = list(chat(stream=True, stream_options={"include_usage": True}))
        said = whole.choices[0].message.content
        self.assertTrue(said)
        self.assertEqual("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices), said)
        self.assertEqual(pieces[0].choices[0].delta.role, "assistant")
        self.assertEqual(pieces[-2].choices[0].finish_reason, whole.choices[0].finish_reason)
        self.assertEqual(pieces[-1].usage.completion_tokens, whole.usage.completion_tokens)
        self.assertEqual({piece.id for piece in pieces}, {pieces[0].id})
        self.assertEqual(whole.model, MODEL)

    def test_the_stream_helper_gathers_the_answer(self):
        with CLIENT.chat.completions.stream(model=MODEL, messages=GREETS, temperature=0, max_tokens=64) as stream:
            said = "".join(event.delta for event in stream if event.type == "content.delta")
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.content, said)
        self.assertEqual(said, chat().choices[0].message.content)

    def test_several_answers_stop_strings_and_probabilities(self):
        answers = chat(n=3, temperature=1, seed=7, logprobs=True, top_logprobs=2)
        self.assertEqual([choice.index for choice in answers.choices], [0, 1, 2])
        for choice in answers.choices:
            told = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
            self.assertTrue(told.decode(errors="replace").startswith(choice.message.content))
            self.assertTrue(all(len(token.top_logprobs) == 2 for token in choice.logprobs.content))
        said = chat().choices[0].message.content
        word = said.split()[1]
        stopped = chat(stop=[word]).choices[0]
        self.assertEqual((stopped.message.content, stopped.finish_reason), (said.split(word)[0], "stop"))
        self.assertEqual(chat(max_completion_tokens=2, max_tokens=openai.NOT_GIVEN).choices[0].finish_reason, "length")

    def test_an_answer_is_parsed_into_a_model(self):
        asked = [{"role": "user", "content": "Name a city."}]
        parsed = CLIENT.chat.completions.parse(
            model=MODEL, messages=asked, response_format=City, temperature=0, max_tokens=200, logit_bias={}
        )
        self.assertIsInstance(parsed.choices[0].message.parsed, City)
        with CLIENT.chat.completions.stream(
            model=MODEL, messages=asked, response_format=City, temperature=0, max_tokens=200
        ) as stream:
            streamed = stream.get_final_completion()
        self.assertEqual(streamed.choices[0].message.parsed, parsed.choices[0].message.parsed)
        # A small model need not come to an end by itself.
        anything = chat(response_format={"type": "json_object"}).choices[0].message.content
        self.assertTrue(anything.startswith("{"), anything)

    def test_tools_are_called_and_their_results_understood(self):
        right, understood = 0, 0
        for asked in questions():
            messages = [{"role": "user", "content": asked.text}]
            called = chat(messages=messages, tools=asked.tools).choices[0]
            self.assertEqual(called.finish_reason, "tool_calls", called)
            [call] = called.message.tool_calls
            right += (call.function.name, json.loads(call.function.arguments)) == (asked.name, asked.arguments)
            messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": asked.result}]
            answered = chat(messages=messages, tools=asked.tools).choices[0]
            understood += (answered.message.content, answered.finish_reason) == (asked.answer, "stop")
        # One less than all: the model misses one, whoever runs it.
        self.assertGreaterEqual(min(right, understood), len(questions()) - 1)

    def test_calls_come_in_pieces_and_can_be_demanded_or_forbidden(self):
        with CLIENT.chat.completions.stream(
            model=MODEL, messages=ASKS, tools=WEATHER.tools, temperature=0, max_tokens=64
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
        self.assertEqual([event.name for event in done], [WEATHER.name])
        self.assertEqual(json.loads(final.message.tool_calls[0].function.arguments), WEATHER.arguments)
        named = {"type": "function", "function": {"name": WEATHER.name}}
        for choice in ["required", named]:
            [call] = chat(messages=ASKS, tools=WEATHER.tools, tool_choice=choice).choices[0].message.tool_calls
            self.assertEqual(call.function.name, WEATHER.name)
        self.assertIsNone(chat(messages=ASKS, tools=WEATHER.tools, tool_choice="none").choices[0].message.tool_calls)

    def test_a_tool_made_of_a_model_is_parsed_into_it(self):
        tool = openai.pydantic_function_tool(GetWeather, name=WEATHER.name)
        called = CLIENT.chat.completions.parse(
            model=MODEL, messages=ASKS, tools=[tool], tool_choice="required", temperature=0, max_tokens=64
        )
        [call] = called.choices[0].message.tool_calls
        self.assertEqual(call.function.parsed_arguments, GetWeather(**WEATHER.arguments))

    def test_many_at_once_by_the_asynchronous_client(self):
        async def ask():
            async with AsyncOpenAI(base_url=V1, api_key=KEY, _strict_response_validation=True) as client:
                one = lambda: client.chat.completions.create(model=MODEL, messages=GREETS, temperature=0, max_tokens=16)
                return await asyncio.gather(*(one() for _ in range(12)))

        self.assertEqual(len({answer.choices[0].message.content for answer in asyncio.run(ask())}), 1)


def respond(**given):
    return CLIENT.responses.create(**{"model": MODEL, "temperature": 0, "max_output_tokens": 64, "input": GREETING} | given)


class Responses(unittest.TestCase):
    TOOLS = [{"type": "function", "strict": False} | tool["function"] for tool in WEATHER.tools]

    def test_whole_and_in_pieces_an_answer_is_the_same(self):
        whole = respond(instructions="Be kind.", metadata={"a": "b"})
        self.assertTrue(whole.output_text)
        self.assertEqual((whole.status, whole.metadata, whole.instructions), ("completed", {"a": "b"}, "Be kind."))
        events = list(respond(instructions="Be kind.", metadata={"a": "b"}, stream=True))
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual((said, events[-1].type), (whole.output_text, "response.completed"))
        self.assertEqual(events[-1].response.usage.output_tokens, whole.usage.output_tokens)
        self.assertEqual(said, chat(messages=[{"role": "system", "content": "Be kind."}, *GREETS]).choices[0].message.content)
        cut = respond(max_output_tokens=2)
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))

    def test_the_stream_helper_gathers_the_answer(self):
        with CLIENT.responses.stream(model=MODEL, input=GREETING, temperature=0, max_output_tokens=64) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        self.assertIn("response.output_text.done", kinds)
        self.assertEqual(final.output_text, respond().output_text)

    def test_an_answer_is_parsed_into_a_model(self):
        given = {"model": MODEL, "input": "Name a city.", "text_format": City, "temperature": 0, "max_output_tokens": 64}
        parsed = CLIENT.responses.parse(**given).output_parsed
        self.assertIsInstance(parsed, City)
        with CLIENT.responses.stream(**given) as stream:
            self.assertEqual(stream.get_final_response().output_parsed, parsed)

    def test_tools_are_called_and_their_results_understood(self):
        items = [{"role": "user", "content": WEATHER.text}]
        called = respond(input=items, tools=self.TOOLS)
        [call] = called.output
        self.assertEqual((call.type, call.name, json.loads(call.arguments)), ("function_call", WEATHER.name, WEATHER.arguments))
        items += [*called.output, {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER.result}]
        answered = respond(input=items, tools=self.TOOLS)
        self.assertEqual(answered.output_text, WEATHER.answer)
        # As clients do that keep what they were told.
        items += [item.model_dump(exclude_none=True) for item in answered.output] + [{"role": "user", "content": GREETING}]
        self.assertTrue(respond(input=items, tools=self.TOOLS).output)
        for choice in ["required", {"type": "function", "name": WEATHER.name}]:
            with CLIENT.responses.stream(
                model=MODEL, input=WEATHER.text, tools=self.TOOLS, tool_choice=choice, temperature=0
            ) as stream:
                done = [event for event in stream if event.type == "response.function_call_arguments.done"]
            self.assertEqual([json.loads(event.arguments) for event in done], [WEATHER.arguments])

    def test_errors_name_what_is_not_kept(self):
        for given in [{"previous_response_id": "resp_1"}, {"store": True}, {"background": True}]:
            with self.assertRaises(openai.BadRequestError) as refused:
                respond(**given)
            self.assertEqual(refused.exception.param, next(iter(given)))


class StoredResponses(unittest.TestCase):
    GIVEN = {"model": MODEL, "temperature": 0, "max_output_tokens": 64}
    ENDLESS = {"type": "object", "properties": {"a": {"type": "string", "minLength": 100_000}}, "required": ["a"]}

    def respond(self, **given):
        return STORES.responses.create(**self.GIVEN | given)

    def test_a_turn_goes_on_from_the_one_before(self):
        first = self.respond(input=WEATHER.text, tools=Responses.TOOLS, metadata={"a": "b"})
        [call] = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER.result}
        second = self.respond(input=[result], tools=Responses.TOOLS, previous_response_id=first.id)
        self.assertEqual((second.output_text, second.previous_response_id), (WEATHER.answer, first.id))
        self.assertEqual(STORES.responses.retrieve(first.id), first)
        items = list(STORES.responses.input_items.list(second.id, order="asc", limit=1))
        self.assertEqual([item.type for item in items], ["message", "function_call", "function_call_output"])
        self.assertEqual(items[0].content[0].text, WEATHER.text)
        self.assertEqual(items[::-1], list(STORES.responses.input_items.list(second.id)))
        with STORES.responses.stream(**self.GIVEN, input=GREETING, previous_response_id=second.id) as stream:
            final = stream.get_final_response()
        self.assertEqual(STORES.responses.retrieve(final.id).output_text, final.output_text)
        STORES.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            STORES.responses.retrieve(first.id)
        with self.assertRaises(openai.BadRequestError) as refused:
            self.respond(input=GREETING, previous_response_id=first.id)
        self.assertEqual(refused.exception.code, "previous_response_not_found")

    def test_answers_come_in_the_background_and_are_cancelled(self):
        response = self.respond(input=GREETING, background=True)
        self.assertEqual((response.status, response.background), ("queued", True))
        deadline = time.monotonic() + 60
        while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
            time.sleep(0.05)
            response = STORES.responses.retrieve(response.id)
        self.assertEqual((response.status, response.output_text), ("completed", respond().output_text))
        form = {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": self.ENDLESS}}
        response = self.respond(input=GREETING, background=True, text=form, max_output_tokens=None)
        self.assertEqual(STORES.responses.cancel(response.id).status, "cancelled")
        self.assertEqual(STORES.responses.retrieve(response.id).status, "cancelled")


class Others(unittest.TestCase):
    def test_texts_are_continued(self):
        given = {"model": MODEL, "temperature": 0, "max_tokens": 8, "prompt": ["Once upon", "The end"], "logprobs": 1}
        whole = CLIENT.completions.create(**given)
        self.assertEqual([choice.index for choice in whole.choices], [0, 1])
        texts = ["", ""]
        # The client's type of a piece is that of a whole answer, which has a reason for its end.
        for piece in LENIENT.completions.create(**given, stream=True):
            for choice in piece.choices:
                texts[choice.index] += choice.text
        self.assertEqual(texts, [choice.text for choice in whole.choices])

    def test_texts_are_embedded(self):
        client = OpenAI(base_url=f"{EMBEDDINGS}/v1", api_key=KEY)
        model = client.models.list().data[0].id
        # Unasked it asks for base64, which it decodes, but not before it checks types.
        packed = client.embeddings.create(model=model, input=["a boat", "a ship"])
        plain = client.embeddings.create(model=model, input="a boat", encoding_format="float")
        self.assertEqual([item.index for item in packed.data], [0, 1])
        for one, other in zip(packed.data[0].embedding, plain.data[0].embedding, strict=True):
            self.assertAlmostEqual(one, other, places=5)

    def test_models_are_listed_and_shown(self):
        self.assertEqual([model.id for model in CLIENT.models.list()], [MODEL])
        self.assertEqual(CLIENT.models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError):
            CLIENT.models.retrieve("other")

    def test_errors_are_those_of_the_client(self):
        with self.assertRaises(openai.BadRequestError) as refused:
            chat(temperature=9)
        self.assertEqual((refused.exception.param, refused.exception.type), ("temperature", "invalid_request_error"))
        with self.assertRaises(openai.BadRequestError) as long:
            chat(messages=[{"role": "user", "content": "word " * 30_000}])
        self.assertEqual(long.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.NotFoundError):
            chat(model="other")
        with self.assertRaises(openai.AuthenticationError):
            CLIENT.with_options(api_key="wrong").models.list()


if __name__ == "__main__":
    unittest.main()
