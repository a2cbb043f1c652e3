#!/opt/openai/bin/python
"""Ask a served model one question with the openai client and print the answer as it streams.

    ask URL MODEL QUESTION...        e.g. ask http://chat.demo.svc/v1 chat "What is the capital of Norway?"

The last line names the version that answered, from the response header x-gantry-version.
"""

import sys

from openai import APIError, OpenAI

TIMEOUT_SECONDS = 60
MAX_TOKENS = 256


def main() -> int:
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    url, model, question = sys.argv[1], sys.argv[2], " ".join(sys.argv[3:])
    client = OpenAI(base_url=url, api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0)
    messages = [{"role": "user", "content": question}]
    try:
        response = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
        )
        for chunk in response.parse():
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    except APIError as error:
        print(f"error from {url}: {error}", file=sys.stderr)
        return 1
    print(f"\n  [answered by version {response.headers.get('x-gantry-version', 'unknown')}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
