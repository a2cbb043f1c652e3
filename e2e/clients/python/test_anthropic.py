"""Anthropic's client, which refuses answers that are not as its types say."""

import asyncio
import unittest

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from common import BASE, GREETING, KEY, MODEL, WEATHER, questions

CLIENT = Anthropic(base_url=BASE, api_key=KEY, _strict_response_validation=True, max_retries=0)
#: Newer releases of the client do not name it.
GREEDY = {"temperature": 0}
GREETS = [{"role": "user", "content": GREETING}]


def tools_of(asked):
    functions = (tool["function"] for tool in asked.tools)
    return [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]


def ask(**given):
    return CLIENT.messages.create(**{"model": MODEL, "max_tokens": 64, "messages": GREETS, "extra_body": GREEDY} | given)


class Messages(unittest.TestCase):
    def test_whole_and_in_pieces_an_answer_is_the_same(self):
        whole = ask()
        self.assertEqual((whole.stop_reason, whole.role), ("end_turn", "assistant"))
        with CLIENT.messages.stream(model=MODEL, extra_body=GREEDY, max_tokens=64, messages=GREETS) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(said, whole.content[0].text)
        self.assertEqual(final.content[0].text, said)
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)

    def test_system_stop_and_length(self):
        self.assertTrue(ask(system=[{"type": "text", "text": "Be brief."}]).content)
        self.assertEqual(ask(max_tokens=2).stop_reason, "max_tokens")
        word = ask().content[0].text.split()[1]
        stopped = ask(stop_sequences=[word])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", word))

    def test_an_answer_that_was_begun_is_continued(self):
        text = ask().content[0].text
        begun = [*GREETS, {"role": "assistant", "content": text[:5]}]
        self.assertEqual(text[:5] + ask(messages=begun).content[0].text, text)

    def test_tools_are_called_and_their_results_understood(self):
        right, understood = 0, 0
        for asked in questions():
            messages = [{"role": "user", "content": asked.text}]
            called = ask(messages=messages, tools=tools_of(asked))
            self.assertEqual(called.stop_reason, "tool_use", called)
            [call] = [block for block in called.content if block.type == "tool_use"]
            right += (call.name, call.input) == (asked.name, asked.arguments)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": asked.result}
            messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
            answered = ask(messages=messages, tools=tools_of(asked))
            said = "".join(block.text for block in answered.content)
            understood += (said, answered.stop_reason) == (asked.answer, "end_turn")
        # One less than all: the model misses one, whoever runs it.
        self.assertGreaterEqual(min(right, understood), len(questions()) - 1)

    def test_calls_come_in_pieces_and_can_be_demanded(self):
        messages = [{"role": "user", "content": WEATHER.text}]
        given = {"model": MODEL, "max_tokens": 64, "messages": messages, "tools": tools_of(WEATHER)}
        for choice in [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": WEATHER.name}]:
            with CLIENT.messages.stream(**given, tool_choice=choice) as stream:
                pieces = [event.partial_json for event in stream if event.type == "input_json"]
                final = stream.get_final_message()
            self.assertTrue(pieces)
            self.assertEqual((final.content[-1].name, final.content[-1].input), (WEATHER.name, WEATHER.arguments))

    def test_tokens_are_counted(self):
        counted = CLIENT.messages.count_tokens(model=MODEL, messages=GREETS, tools=tools_of(WEATHER))
        used = ask(tools=tools_of(WEATHER)).usage
        self.assertEqual(counted.input_tokens, used.input_tokens + used.cache_read_input_tokens)

    def test_many_at_once_by_the_asynchronous_client(self):
        async def ask():
            async with AsyncAnthropic(base_url=BASE, api_key=KEY, _strict_response_validation=True) as client:
                one = lambda: client.messages.create(model=MODEL, messages=GREETS, extra_body=GREEDY, max_tokens=16)
                return await asyncio.gather(*(one() for _ in range(12)))

        self.assertEqual(len({answer.content[0].text for answer in asyncio.run(ask())}), 1)

    def test_errors_are_those_of_the_client(self):
        with self.assertRaises(anthropic.BadRequestError):
            ask(extra_body={"temperature": 9})
        with self.assertRaises(anthropic.NotFoundError):
            ask(model="other")
        with self.assertRaises(anthropic.AuthenticationError):
            CLIENT.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=GREETS)

    def test_models_are_listed(self):
        self.assertEqual([model.id for model in CLIENT.models.list()], [MODEL])


if __name__ == "__main__":
    unittest.main()
