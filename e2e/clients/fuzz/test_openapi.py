"""What a server says of itself holds: its OpenAPI document is valid, and schemathesis, which makes requests of it, right and wrong ones,
finds no answer that the document does not describe, and no 5xx but 503 with Retry-After.

GANTRY_FUZZ_EXAMPLES: how many requests are made of each operation beside those for its bounds.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import urllib.request

from openapi_spec_validator import OpenAPIV31SpecValidator, validate

URL = os.environ["GANTRY_STORING_URL"]
KEY = os.environ["GANTRY_KEY"]
EXAMPLES = os.environ.get("GANTRY_FUZZ_EXAMPLES", "8")
SEED = os.environ.get("GANTRY_FUZZ_SEED", "31")
HOOKS = pathlib.Path(__file__).parent / "hooks.py"
CHECKS = [
    "no_failure_of_the_server",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]


def ask(path, body=None):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers), timeout=60) as answer:
        return json.load(answer)


class Document(unittest.TestCase):
    def test_is_valid(self):
        document = ask("/openapi.json")
        self.assertEqual(document["openapi"], "3.1.0")
        validate(document, cls=OpenAPIV31SpecValidator)

    def test_holds_for_whatever_is_made_of_it(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                pathlib.Path(sys.executable).parent / "schemathesis", "run", URL + "/openapi.json",
                "--header", f"Authorization: Bearer {KEY}", "--phases", "examples,coverage,fuzzing",
                "--checks", ",".join(CHECKS), "--max-examples", EXAMPLES, "--seed", SEED, "--workers", "1",
                "--continue-on-failure", "--no-shrink", "--suppress-health-check", "all", "--warnings", "off",
                "--generation-database", "none", "--request-timeout", "60", "--no-color",
            ]
            environment = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HOOKS.parent)}
            ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        print(ran.stdout[-4000:], file=sys.stderr)
        self.assertEqual(ran.returncode, 0, ran.stdout[-20000:] + ran.stderr[-4000:])
        chat = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 16}
        self.assertTrue(ask("/v1/chat/completions", chat)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    unittest.main()
