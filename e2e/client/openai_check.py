"""Asks a served model through the openai package, whole and streamed, and prints what came back as JSON.

    python3 openai_check.py BASE_URL MODEL QUESTION
"""

import json
import sys

from openai import OpenAI

base_url, model, question = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key="none", timeout=60, max_retries=0)
messages = [{"role": "user", "content": question}]
options = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0, "seed": 1}


def whole():
    raw = client.chat.completions.with_raw_response.create(**options)
    answer = raw.parse()
    return {
        "text": answer.choices[0].message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "versions": sorted({raw.headers["x-gantry-version"], answer.system_fingerprint}),
        "usage": answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}),
    }


def streamed():
    raw = client.chat.completions.with_raw_response.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    versions, text, pieces, finish_reason, usage = {raw.headers["x-gantry-version"]}, "", 0, None, None
    for chunk in raw.parse():
        versions.add(chunk.system_fingerprint)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            pieces += bool(choice.delta.content)
            finish_reason = choice.finish_reason or finish_reason
    return {
        "text": text,
        "pieces": pieces,
        "finish_reason": finish_reason,
        "versions": sorted(versions),
        "usage": usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}),
    }


def completion():
    answer = client.completions.create(model=model, prompt="Kubernetes is", max_tokens=8, temperature=0)
    return {"tokens": answer.usage.completion_tokens, "version": answer.system_fingerprint}


def tools():
    """One round of tools: what is called, whole and through the stream helper, and what is said of the result."""
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    asked = [{"role": "user", "content": "What's the weather like in Seoul?"}]
    options = {"model": model, "tools": [weather], "max_tokens": 64, "temperature": 0}
    choice = client.chat.completions.create(messages=asked, **options).choices[0]
    with client.chat.completions.stream(messages=asked, **options) as stream:
        final = stream.get_final_completion().choices[0]
    call = choice.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"city": "Seoul", "temperature": 11, "condition": "stormy"}'}
    after = client.chat.completions.create(messages=[*asked, choice.message, result], **options).choices[0]
    called = lambda choice: [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls]
    return {
        "finish_reasons": [choice.finish_reason, final.finish_reason, after.finish_reason],
        "whole": called(choice),
        "streamed": called(final),
        "after": after.message.content,
    }


models = [served.id for served in client.models.list()]
print(json.dumps({"models": models, "whole": whole(), "streamed": streamed(), "completion": completion(), "tools": tools()}))
