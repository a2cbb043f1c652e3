// Vercel's AI SDK, by each protocol that it speaks with this server.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { base, embeddings, key, model, storing, weather } from "./common.js";

const v1 = `${base}/v1`;
const compatible = createOpenAICompatible({ name: "gantry", baseURL: v1, apiKey: key, supportsStructuredOutputs: true });
const ways = {
  "openai-compatible": compatible(model),
  openai: createOpenAI({ baseURL: v1, apiKey: key }).chat(model),
  responses: createOpenAI({ baseURL: v1, apiKey: key }).responses(model),
  // Which names items of answers before, in place of what they say.
  "responses that are stored": createOpenAI({ baseURL: `${storing}/v1`, apiKey: key }).responses(model),
  anthropic: createAnthropic({ baseURL: v1, apiKey: key })(model),
};
const given = { temperature: 0, maxOutputTokens: 64, maxRetries: 0 };

for (const [name, way] of Object.entries(ways)) {
  test(`${name}: whole and in pieces an answer is the same`, async () => {
    const { text } = await generateText({ ...given, model: way, prompt: "Hello!" });
    assert.ok(text);
    let said = "";
    for await (const piece of streamText({ ...given, model: way, prompt: "Hello!" }).textStream) said += piece;
    assert.equal(said, text);
  });

  test(`${name}: tools are run until there is an answer`, async () => {
    const called = [];
    const tools = {
      [weather.name]: tool({
        description: "Get the current weather in a city",
        inputSchema: z.object({ city: z.string() }),
        execute: async (input) => (called.push(input), weather.result),
      }),
    };
    const asked = { ...given, model: way, tools, prompt: weather.text, stopWhen: stepCountIs(3) };
    assert.equal((await generateText(asked)).text, weather.answer);
    assert.equal(await streamText(asked).text, weather.answer);
    assert.deepEqual(called, [weather.arguments, weather.arguments]);
  });
}

test("an answer has the form of a schema", async () => {
  const schema = z.object({ name: z.enum(["Seoul", "Rome"]), coast: z.boolean() });
  for (const name of ["openai-compatible", "openai", "responses"]) {
    const { output } = await generateText({ ...given, model: ways[name], output: Output.object({ schema }), prompt: "Name a city." });
    assert.ok(schema.safeParse(output).success, name);
  }
});

test("texts are embedded", async () => {
  const embeds = createOpenAICompatible({ name: "gantry", baseURL: `${embeddings}/v1`, apiKey: key });
  const made = await embedMany({ model: embeds.textEmbeddingModel(model), values: ["a boat", "a ship"] });
  assert.equal(made.embeddings.length, 2);
});
