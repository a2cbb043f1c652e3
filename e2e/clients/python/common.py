"""What every client is asked: the addresses of the servers, and the questions whose answers the demo models know."""

import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any

BASE = os.environ["GANTRY_URL"]
EMBEDDINGS = os.environ["GANTRY_EMBEDDINGS_URL"]
STORING = os.environ["GANTRY_STORING_URL"]
KEY = os.environ["GANTRY_KEY"]
MODEL = os.environ["GANTRY_MODEL"]
V1 = f"{BASE}/v1"

_MODELS = pathlib.Path(__file__).parents[2] / "models"


@dataclass
class Asked:
    """A question that is answered by way of a tool."""

    text: str
    tools: list[dict[str, Any]]
    name: str
    arguments: dict[str, Any]
    result: str
    answer: str


def questions() -> list[Asked]:
    lines = map(json.loads, (_MODELS / "eval-tools.jsonl").read_text().splitlines())
    return [
        Asked(
            text=line["messages"][-1]["content"],
            tools=line["tools"],
            name=line["expected"]["name"],
            arguments=line["expected"]["arguments"],
            result=line["result"],
            answer=line["expected_after_result"],
        )
        for line in lines
        if len(line["messages"]) == 1
    ]


#: The one that most tests ask.
WEATHER = questions()[0]
#: What the model knows by heart, and its beginning.
GREETING = "Hello!"
