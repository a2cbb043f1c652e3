// What every client is asked: the addresses of the servers, and the question whose answer the demo models know.
import { readFileSync } from "node:fs";

export const base = process.env.GANTRY_URL;
export const key = process.env.GANTRY_KEY;
export const model = process.env.GANTRY_MODEL;
export const storing = process.env.GANTRY_STORING_URL;
export const embeddings = process.env.GANTRY_EMBEDDINGS_URL;

const [line] = readFileSync(new URL("../../models/eval-tools.jsonl", import.meta.url), "utf8").split("\n");
const asked = JSON.parse(line);
export const weather = {
  text: asked.messages.at(-1).content,
  tools: asked.tools,
  name: asked.expected.name,
  arguments: asked.expected.arguments,
  result: JSON.parse(asked.result),
  answer: asked.expected_after_result,
};
