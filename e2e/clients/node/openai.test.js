// OpenAI's client for Node.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { base, embeddings, key, model, weather } from "./common.js";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: 0 });
const greets = [{ role: "user", content: "Hello!" }];
const given = { model, temperature: 0, max_tokens: 64 };

test("whole and in pieces an answer is the same", async () => {
  const whole = await client.chat.completions.create({ ...given, messages: greets });
  let said = "";
  for await (const piece of await client.chat.completions.create({ ...given, messages: greets, stream: true })) {
    said += piece.choices[0]?.delta.content ?? "";
  }
  assert.ok(said);
  assert.equal(whole.choices[0].message.content, said);
  const gathered = await client.chat.completions.stream({ ...given, messages: greets }).finalChatCompletion();
  assert.equal(gathered.choices[0].message.content, said);
});

test("tools are run until there is an answer", async () => {
  const tool = weather.tools.find((one) => one.function.name === weather.name).function;
  const runner = client.chat.completions.runTools({
    ...given,
    messages: [{ role: "user", content: weather.text }],
    tools: [{ type: "function", function: { ...tool, parse: JSON.parse, function: async () => weather.result } }],
  });
  assert.equal(await runner.finalContent(), weather.answer);
});

test("an answer has the form of a schema", async () => {
  const City = z.object({ name: z.enum(["Seoul", "Rome"]), coast: z.boolean() });
  const parsed = await client.chat.completions.parse({
    ...given,
    messages: [{ role: "user", content: "Name a city." }],
    response_format: zodResponseFormat(City, "city"),
  });
  assert.ok(City.safeParse(parsed.choices[0].message.parsed).success);
});

test("texts are embedded, models listed, and errors known", async () => {
  const embeds = new OpenAI({ baseURL: `${embeddings}/v1`, apiKey: key });
  const made = await embeds.embeddings.create({ model, input: ["a boat", "a ship"] });
  assert.equal(made.data.length, 2);
  assert.ok(made.data[0].embedding.every(Number.isFinite));
  const models = await client.models.list();
  assert.deepEqual(models.data.map((one) => one.id), [model]);
  await assert.rejects(client.chat.completions.create({ ...given, model: "other", messages: greets }), OpenAI.NotFoundError);
  await assert.rejects(
    client.chat.completions.create({ ...given, messages: [{ role: "user", content: "word ".repeat(30_000) }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
  );
});
