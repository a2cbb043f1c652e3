"""EleutherAI's lm-evaluation-harness scores a served model by its log-probabilities, and knows nothing else of it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BASE = os.environ["GANTRY_URL"]
MODEL = os.environ["GANTRY_MODEL"]
FOLDER = pathlib.Path(__file__).parent
EVALUATED = FOLDER.parents[1] / "models" / "eval.jsonl"
ITEMS = 50
CHOICES = 4
# By chance a quarter is right; the demo model knows all answers.
LEAST_ACCURACY = 0.6


def items() -> list[dict[str, object]]:
    """Questions of one turn, each with its answer at a place of its own among the nearest others of its kind."""
    lines = [json.loads(line) for line in EVALUATED.read_text().splitlines()]
    lines = [line for line in lines if len(line["messages"]) == 1]
    made: list[dict[str, object]] = []
    for line in lines:
        of_kind = [other["expected"] for other in lines if other["kind"] == line["kind"]]
        others = of_kind + [other["expected"] for other in lines]
        wrong = [other for other in dict.fromkeys(others) if other != line["expected"]][: CHOICES - 1]
        place = len(made) % CHOICES
        answers = wrong[:place] + [line["expected"]] + wrong[place:]
        made.append({"question": line["messages"][0]["content"], "answers": answers, "answer": place})
    return made[:ITEMS]


class LmEval(unittest.TestCase):
    def accuracy(self, **arguments: object) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            shutil.copy(FOLDER / "facts.yaml", path)
            (path / "facts.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items()))
            told = {"model": MODEL, "base_url": f"{BASE}/v1/completions", **arguments}
            command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
            command += ["--model_args", ",".join(f"{name}={value}" for name, value in told.items())]
            command += ["--include_path", folder, "--tasks", "gantry_facts", "--output_path", str(path / "results.json")]
            environment = os.environ | {"OPENAI_API_KEY": os.environ["GANTRY_KEY"], "HF_HUB_OFFLINE": "1"}
            environment |= {"HF_DATASETS_OFFLINE": "1", "HF_HOME": folder}
            ran = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
            (results,) = path.glob("results*.json")
            return float(json.loads(results.read_text())["results"]["gantry_facts"]["acc,none"])

    def test_it_scores_above_chance(self) -> None:
        key = os.environ["GANTRY_KEY"]
        # It asks the server what the tokens are.
        accuracy = self.accuracy(auth_token=key, num_concurrent=4)
        print(f"accuracy of {MODEL}: {accuracy}", file=sys.stderr)
        self.assertGreater(accuracy, LEAST_ACCURACY)


if __name__ == "__main__":
    unittest.main()
