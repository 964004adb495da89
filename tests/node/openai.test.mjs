// The official JavaScript SDK before a real stack. test_openai_node.py starts it and says where it is.
//
// KAITEN_URL: a gateway; KAITEN_KEYED_URL: one that asks for the key `right`; KAITEN_NARROW_URL: one
// that follows a single stream; KAITEN_EMPTY_URL: one of a cell that has no worker.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";

const { KAITEN_URL, KAITEN_KEYED_URL, KAITEN_NARROW_URL, KAITEN_EMPTY_URL } = process.env;
const model = "mini";
const prompt = "The chef says";
const messages = [{ role: "user", content: "Hello!" }];
const GREEDY = " that good rice needs time and warm hands";
const STOP = GREEDY.split(" ")[3];
// Several seconds of work, which ends before its time only when somebody ends it.
const LONG = { model, prompt, max_tokens: 900, n: 8, ignore_eos: true };
const INVALID = { status: 400, type: "invalid_request_error" };

// A client and what its tries came to: each is a try's status, headers and moment.
function clientOf(baseURL = KAITEN_URL, options = {}) {
  const tries = [];
  async function counted(url, init) {
    const sent = performance.now();
    const { status, headers } = await fetch(url, init).then((reply) => (tries.reply = reply));
    tries.push({ status, headers, sent, answered: performance.now(), asked: new Headers(init.headers) });
    return tries.reply;
  }
  const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0, timeout: 60_000, fetch: counted, ...options });
  return { client, tries, statuses: () => tries.map((each) => each.status) };
}

const { client } = clientOf();

async function allOf(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

// What the gateway counts under this name.
async function counted(name) {
  const page = await (await fetch(new URL("/metrics", KAITEN_URL))).text();
  const line = page.split("\n").find((each) => each.startsWith(`kaiten_gateway_${name} `));
  return line ? Number(line.split(" ")[1]) : 0;
}

// A busy machine may be through with a request, or not have taken it, before it is given up.
async function isCancelled(giveUpAfter) {
  const LEFT = 'requests_ended_total{outcome="left"}', before = await counted(LEFT);
  for (let afterMs = 100; afterMs < 20_000; afterMs *= 2) {
    await giveUpAfter(afterMs);
    while (await counted("requests_live")) await sleep(20);
    if ((await counted(LEFT)) > before) return;
  }
  assert.fail("no request was cancelled");
}

test("a completion", async () => {
  const answer = await client.completions.create({ model, prompt, max_tokens: 8, temperature: 0 });
  const [choice] = answer.choices;
  assert.equal(answer.object, "text_completion");
  assert.equal(answer.model, model);
  assert.equal(choice.text, GREEDY);
  assert.equal(choice.finish_reason, "length");
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  assert.deepEqual([completion_tokens, total_tokens], [8, prompt_tokens + 8]);
});

test("a response in the background, taken up again after every event", async () => {
  const asked = { model, input: "Tell me about soup.", temperature: 0, max_output_tokens: 16 };
  const begun = await client.responses.create({ ...asked, background: true });
  assert.equal(begun.status, "queued");
  const events = await allOf(await client.responses.retrieve(begun.id, { stream: true }));
  const whole = events.at(-1).response;
  const textOf = (some) => some.map((each) => each.delta ?? "").join("");
  assert.equal(events.at(-1).type, whole.incomplete_details ? "response.incomplete" : "response.completed");
  assert.equal(textOf(events), whole.output[0].content[0].text);
  for (const [index, { sequence_number }] of events.entries()) {
    const rest = await allOf(await client.responses.retrieve(begun.id, { stream: true, starting_after: sequence_number }));
    assert.equal(textOf(events.slice(0, index + 1)) + textOf(rest), textOf(events));
  }
  const same = await client.responses.create(asked);
  assert.equal(same.output_text, textOf(events));
  const next = await client.responses.create({ ...asked, input: "And?", previous_response_id: begun.id });
  assert.ok(next.usage.input_tokens > same.usage.input_tokens);
});

test("a streamed response, left in the middle and taken up where it was", async () => {
  const asked = { model, input: "Tell me about soup.", temperature: 0, max_output_tokens: 16 };
  const events = await allOf(await client.responses.create({ ...asked, stream: true }));
  // How many tokens come with a delta differs from time to time.
  const textOf = (some) => some.map((each) => each.delta ?? "").join("");
  const kindsOf = (some) => some.map((each) => each.type).filter((type) => !type.endsWith(".delta"));
  const sum = await client.responses.stream(asked).finalResponse();
  assert.equal(sum.output_text, textOf(events));
  const numbers = events.map((each) => each.sequence_number);
  assert.deepEqual(numbers, [...new Set(numbers)].sort((a, b) => a - b));
  const seen = [];
  for await (const event of await client.responses.create({ ...asked, stream: true, background: true })) {
    seen.push(event);
    if (event.type === "response.output_text.delta") break;
  }
  const { id } = seen[0].response, starting_after = seen.at(-1).sequence_number;
  const rest = await allOf(await client.responses.retrieve(id, { stream: true, starting_after }));
  assert.equal(textOf([...seen, ...rest]), textOf(events));
  assert.deepEqual(kindsOf([...seen, ...rest]), kindsOf(events));
});

test("a response is cancelled, deleted, and then found by nobody", async () => {
  const asked = { model, input: "Soup?", max_output_tokens: 900, ignore_eos: true, background: true };
  // One that came to its end before it was cancelled stays what it is; then the next.
  let id;
  do ({ id } = await client.responses.create(asked));
  while ((await client.responses.cancel(id)).status !== "cancelled");
  assert.equal((await client.responses.retrieve(id)).status, "cancelled");
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

test("a conversation, with which responses go on", async () => {
  const { conversations, responses } = client;
  const { id, metadata } = await conversations.create({ metadata: { of: "node" }, items: [{ role: "user", content: "Hello!" }] });
  assert.deepEqual(metadata, { of: "node" });
  const asked = { model, conversation: id, temperature: 0, max_output_tokens: 16 };
  const first = await responses.create({ ...asked, input: "Tell me about soup." });
  const events = await allOf(await responses.create({ ...asked, input: "And?", stream: true }));
  const second = events.at(-1).response;
  assert.deepEqual(second.conversation, { id });
  const items = await allOf(await conversations.items.list(id, { order: "asc", limit: 2 }));
  const said = [first, second].map((each) => each.output[0].content[0].text);
  const texts = items.map((each) => each.content[0].text);
  assert.deepEqual(texts, ["Hello!", "Tell me about soup.", said[0], "And?", said[1]]);
  const { data } = await conversations.items.create(id, { items: [{ role: "user", content: "Hm." }] });
  assert.deepEqual({ ...(await conversations.items.retrieve(data[0].id, { conversation_id: id })) }, { ...data[0] });
  assert.equal((await conversations.items.delete(data[0].id, { conversation_id: id })).id, id);
  assert.deepEqual((await conversations.update(id, { metadata: {} })).metadata, {});
  assert.equal((await conversations.delete(id)).deleted, true);
  await assert.rejects(conversations.retrieve(id), OpenAI.NotFoundError);
  await assert.rejects(responses.create({ ...asked, input: "x" }), { ...INVALID, param: "conversation" });
});

// A file of a batch with one line for each body.
async function uploaded(bodies, options = {}) {
  const lines = Object.entries(bodies).map(([custom_id, body]) => {
    return JSON.stringify({ custom_id, method: "POST", url: "/v1/completions", body });
  });
  return client.files.create({ file: new File([lines.join("\n")], "in.jsonl"), purpose: "batch", ...options });
}

async function begunBatch(input, metadata = {}) {
  const asked = { input_file_id: input.id, endpoint: "/v1/completions", completion_window: "24h", metadata };
  return client.batches.create(asked);
}

async function batchThatIs(status, batch) {
  while (batch.status !== status) {
    await sleep(20);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

// All there are, however few come at a time: the SDK asks for the next page itself.
async function idsOf(resource, query) {
  const pages = await resource.list(query);
  assert.ok(pages.data.length <= query.limit);
  return (await allOf(pages)).map((each) => each.id);
}

test("a batch of lines is answered", async () => {
  const input = await uploaded({ a: { model, prompt, max_tokens: 8, temperature: 0 }, b: { model, prompt, temperature: 3 } });
  const batch = await batchThatIs("completed", await begunBatch(input, { of: "node" }));
  const { total, completed, failed } = batch.request_counts;
  assert.deepEqual([total, completed, failed, batch.metadata], [2, 1, 1, { of: "node" }]);
  const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
  assert.equal(answer.response.body.choices[0].text, GREEDY);
  const refused = JSON.parse(await (await client.files.content(batch.error_file_id)).text());
  assert.deepEqual([refused.custom_id, refused.response.status_code], ["b", 400]);
  const outputs = await idsOf(client.files, { purpose: "batch_output", limit: 100 });
  assert.ok([batch.output_file_id, batch.error_file_id].every((id) => outputs.includes(id)) && !outputs.includes(input.id));
  await assert.rejects(client.batches.cancel("batch_0"), { ...INVALID, param: "id" });
  assert.equal((await client.batches.cancel(batch.id)).status, "completed");
});

test("a batch is cancelled, and is in the list, page by page", async () => {
  const input = await uploaded({ a: LONG, b: LONG });
  const [first, second] = [await begunBatch(input), await begunBatch(input)];
  assert.ok(["cancelling", "cancelled"].includes((await client.batches.cancel(first.id)).status));
  const { cancelled_at, cancelling_at } = await batchThatIs("cancelled", first);
  assert.ok(cancelled_at >= cancelling_at && cancelling_at >= first.created_at);
  await client.batches.cancel(second.id);
  await batchThatIs("cancelled", second);
  const all = await idsOf(client.batches, { limit: 100 });
  assert.deepEqual(await idsOf(client.batches, { limit: 1 }), all);
  assert.ok([first, second].every(({ id }) => all.includes(id)));
  await assert.rejects(client.batches.list({ after: "batch_0" }), { ...INVALID, param: "after" });
  await assert.rejects(client.batches.cancel(`batch_${"0".repeat(24)}`), OpenAI.NotFoundError);
});

test("files are listed page by page, read, and deleted", async () => {
  const expires_after = { anchor: "created_at", seconds: 3600 };
  const some = [];
  for (const word of ["a", "é", "寿"]) some.push(await uploaded({ [word]: { model, prompt: word } }, { expires_after }));
  const found = await client.files.retrieve(some[1].id);
  assert.deepEqual({ ...found }, { ...some[1] });
  const { object, purpose, filename, status } = found;
  assert.deepEqual([object, purpose, filename, status], ["file", "batch", "in.jsonl", "processed"]);
  assert.equal(found.expires_at - found.created_at, expires_after.seconds);
  assert.deepEqual({ ...(await client.files.waitForProcessing(found.id)) }, { ...found });
  const content = await (await client.files.content(found.id)).text();
  assert.deepEqual([new TextEncoder().encode(content).length, JSON.parse(content).custom_id], [found.bytes, "é"]);
  const newest = await idsOf(client.files, { limit: 2, purpose: "batch" });
  assert.ok(some.every(({ id }) => newest.includes(id)));
  assert.equal(new Set(newest).size, newest.length);
  assert.deepEqual(await idsOf(client.files, { limit: 2, purpose: "batch", order: "asc" }), [...newest].reverse());
  for (const { id } of some) {
    assert.deepEqual({ ...(await client.files.delete(id)) }, { id, object: "file", deleted: true });
    await assert.rejects(client.files.retrieve(id), OpenAI.NotFoundError);
    await assert.rejects(client.files.content(id), OpenAI.NotFoundError);
    await assert.rejects(client.files.delete(id), OpenAI.NotFoundError);
  }
  const left = await idsOf(client.files, { limit: 2, purpose: "batch" });
  assert.ok(!some.some(({ id }) => left.includes(id)));
  await assert.rejects(client.files.list({ limit: 0 }), { ...INVALID, param: "limit" });
  await assert.rejects(client.files.create({ file: new File(["{}"], "x"), purpose: "vision" }), { ...INVALID, param: "purpose" });
});

test("a streamed completion is the same as a whole one", async () => {
  const body = { model, prompt, max_tokens: 12, temperature: 0, n: 2, logprobs: 2 };
  const whole = await client.completions.create(body);
  const stream = await client.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
  const chunks = await allOf(stream);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  assert.deepEqual(chunks.at(-1).choices, []);
  for (const { index, text, logprobs, finish_reason } of whole.choices) {
    const mine = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
    assert.equal(mine.map((choice) => choice.text).join(""), text);
    assert.deepEqual(mine.flatMap((choice) => choice.logprobs?.tokens ?? []), logprobs.tokens);
    assert.deepEqual(mine.map((choice) => choice.finish_reason).filter(Boolean), [finish_reason]);
  }
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
});

test("a stop string, and why it ended", async () => {
  const answer = await client.completions.create({ model, prompt, max_tokens: 12, temperature: 0, stop: [STOP] });
  assert.equal(answer.choices[0].text, GREEDY.slice(0, GREEDY.indexOf(STOP)));
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("several prompts and several choices", async () => {
  const answer = await client.completions.create({ model, prompt: [prompt, "The salmon"], n: 3, max_tokens: 2 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3, 4, 5]);
});

test("unicode comes back as it was sent", async () => {
  const text = "寿司 🍣 ñandú";
  const answer = await client.completions.create({ model, prompt: text, max_tokens: 1, echo: true });
  assert.ok(answer.choices[0].text.startsWith(text));
});

test("a chat", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 100, n: 2, logprobs: true, top_logprobs: 3 };
  const answer = await client.chat.completions.create(body);
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices.length, 2);
  for (const { message, finish_reason, logprobs } of answer.choices) {
    assert.equal(message.role, "assistant");
    assert.ok(message.content.length > 3);
    assert.equal(finish_reason, "stop");
    const bytes = logprobs.content.flatMap((token) => token.bytes);
    assert.ok(new TextDecoder().decode(new Uint8Array(bytes)).startsWith(message.content));
    assert.ok(logprobs.content.every((token) => token.top_logprobs.length === 3));
  }
});

test("the limits of a chat's tokens", async () => {
  for (const limit of [{ max_tokens: 3 }, { max_completion_tokens: 3 }]) {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, ...limit });
    assert.equal(answer.usage.completion_tokens, 3);
    assert.equal(answer.choices[0].finish_reason, "length");
  }
});

// The SDK puts the chunks together itself, and is strict about their form.
test("the SDK's own sum of a streamed chat is the whole chat", async () => {
  const body = { model, messages, temperature: 0, max_tokens: 40, n: 2, logprobs: true, top_logprobs: 2 };
  const whole = await client.chat.completions.create(body);
  const runner = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
  let heard = "";
  runner.on("content", (delta) => (heard += delta));
  const sum = await runner.finalChatCompletion();
  assert.equal((await runner.totalUsage()).total_tokens, whole.usage.total_tokens);
  assert.deepEqual(sum.usage, whole.usage);
  assert.equal(heard.length, 2 * whole.choices[0].message.content.length);
  for (const [index, choice] of sum.choices.entries()) {
    assert.equal(choice.message.content, whole.choices[index].message.content);
    assert.equal(choice.finish_reason, whole.choices[index].finish_reason);
    assert.deepEqual(choice.logprobs.content, whole.choices[index].logprobs.content);
  }
});

test("a chat parsed by the SDK", async () => {
  const parsed = await client.chat.completions.parse({ model, messages, temperature: 0, max_tokens: 40 });
  assert.equal(parsed.choices[0].message.parsed, null);
  assert.ok(parsed.choices[0].message.content);
});

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
  const { id, object, owned_by } = await client.models.retrieve(model);
  assert.deepEqual({ id, object, owned_by }, { id: model, object: "model", owned_by: "kaiten" });
});

const WRONG = [
  ["temperature", { temperature: 3 }],
  ["n", { n: 0 }],
  ["stop", { stop: Array(17).fill("x") }, "too_long"],
  ["max_tokens", { max_tokens: 1_000_000 }, "context_length_exceeded"],
  ["prompt", { prompt: "sushi ".repeat(2000) }, "context_length_exceeded"],
  ["max_token", { max_token: 5 }],
];
for (const [param, change, code = null] of WRONG) {
  test(`400 names ${param}: ${Object.keys(change)}`, async () => {
    const asked = clientOf(KAITEN_URL, { maxRetries: 3 });
    const refused = asked.client.completions.create({ model, prompt: "x", max_tokens: 2, ...change });
    await assert.rejects(refused, (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      const { status, type } = error;
      assert.deepEqual([{ status, type }, error.param, error.code], [INVALID, param, code]);
      assert.match(error.message, new RegExp(param));
      return true;
    });
    assert.deepEqual(asked.statuses(), [400]);
  });
}

test("a refused stream is an error before it is a stream", async () => {
  const refused = client.chat.completions.create({ model, messages: [], stream: true });
  await assert.rejects(refused, { ...INVALID, param: "messages" });
});

test("404 is sent once", async () => {
  const asked = clientOf(KAITEN_URL, { maxRetries: 3 });
  const notFound = (code) => (error) => error instanceof OpenAI.NotFoundError && error.code === code;
  await assert.rejects(asked.client.completions.create({ model: "gpt-4", prompt }), notFound("model_not_found"));
  await assert.rejects(asked.client.models.retrieve("gpt-4"), notFound("model_not_found"));
  await assert.rejects(asked.client.embeddings.create({ model, input: "x" }), notFound("unknown_url"));
  assert.deepEqual(asked.statuses(), [404, 404, 404]);
});

test("401 is sent once, and the right key is served", async () => {
  const wrong = clientOf(KAITEN_KEYED_URL, { maxRetries: 3 });
  for (const refused of [wrong.client.models.list(), wrong.client.completions.create({ model, prompt })]) {
    await assert.rejects(refused, (error) => error instanceof OpenAI.AuthenticationError && error.code === "invalid_api_key");
  }
  assert.deepEqual(wrong.statuses(), [401, 401]);
  const right = wrong.client.withOptions({ apiKey: "right" });
  assert.equal((await right.completions.create({ model, prompt, max_tokens: 1 })).usage.completion_tokens, 1);
});

// Without x-should-retry the SDK sends 409 and 5xx again.
test("409 is sent once, and the same request again is the same request", async () => {
  const asked = clientOf(KAITEN_URL, { maxRetries: 3 });
  const named = { headers: { "idempotency-key": randomUUID() } };
  const body = { model, prompt, max_tokens: 2 };
  const first = await asked.client.completions.create(body, named);
  assert.equal((await asked.client.completions.create(body, named)).id, first.id);
  await assert.rejects(asked.client.completions.create({ ...body, prompt: "x" }, named), OpenAI.ConflictError);
  assert.deepEqual(asked.statuses(), [200, 200, 409]);
});

test("504 is sent once", async () => {
  const asked = clientOf(KAITEN_URL, { maxRetries: 3 });
  const hurried = { headers: { "x-request-timeout-s": "0.2" } };
  const late = asked.client.completions.create(LONG, hurried);
  await assert.rejects(late, (error) => error instanceof OpenAI.InternalServerError && error.code === "deadline_exceeded");
  assert.deepEqual(asked.statuses(), [504]);
  await assert.rejects(async () => {
    for await (const _ of await asked.client.completions.create({ ...LONG, stream: true }, hurried));
  }, (error) => error instanceof OpenAI.APIError && /deadline/.test(error.message));
});

test("503 is sent again when the server says, and no earlier", async () => {
  const asked = clientOf(KAITEN_EMPTY_URL, { maxRetries: 1 });
  const refused = asked.client.models.list();
  await assert.rejects(refused, (error) => error instanceof OpenAI.InternalServerError && error.code === "unavailable");
  assert.deepEqual(asked.statuses(), [503, 503]);
  const [first, second] = asked.tries;
  const waitMs = Number(first.headers.get("retry-after-ms"));
  assert.ok(waitMs > 0 && Number(first.headers.get("retry-after")) >= 1);
  // Timers may be a millisecond early.
  assert.ok(second.sent - first.answered >= waitMs - 2, `${second.sent - first.answered} ms`);
  assert.equal(second.asked.get("x-stainless-retry-count"), "1");
});

test("429 is sent again until there is room", async () => {
  const { client: first } = clientOf(KAITEN_NARROW_URL);
  const stream = await first.completions.create({ ...LONG, logprobs: 20, stream: true });
  await stream[Symbol.asyncIterator]().next();
  const asked = clientOf(KAITEN_NARROW_URL, { maxRetries: 20 });
  const body = { model, prompt, max_tokens: 1 };
  await assert.rejects(asked.client.completions.create(body, { maxRetries: 0 }), (error) => {
    return error instanceof OpenAI.RateLimitError && error.type === "rate_limit_error";
  });
  const patient = asked.client.completions.create(body);
  while (asked.tries.length < 2) await sleep(5);
  stream.controller.abort();
  assert.equal((await patient).usage.completion_tokens, 1);
  assert.deepEqual([...new Set(asked.statuses())], [429, 200]);
});

test("a timeout of the client cancels on the server", async () => {
  await isCancelled(async (timeout) => {
    await assert.rejects(client.completions.create(LONG, { timeout }), OpenAI.APIConnectionTimeoutError);
  });
});

test("an abort before the answer cancels on the server", async () => {
  await isCancelled(async (afterMs) => {
    const signal = AbortSignal.timeout(afterMs);
    await assert.rejects(client.completions.create(LONG, { signal }), OpenAI.APIUserAbortError);
  });
});

// Three ways to leave a stream; the SDK makes an abort of each.
const WAYS = {
  "the caller's signal": { leave: (_, controller) => controller.abort() },
  "the stream's own controller": { leave: (stream) => stream.controller.abort() },
  "a break": { leave: () => {}, breaks: true },
};
for (const [name, { leave, breaks }] of Object.entries(WAYS)) {
  test(`a stream left by ${name} is cancelled on the server`, async () => {
    await isCancelled(async () => {
      const controller = new AbortController();
      const stream = await client.completions.create({ ...LONG, stream: true }, { signal: controller.signal });
      let isFirst = true;
      for await (const _ of stream) {
        if (isFirst) leave(stream, controller);
        isFirst = false;
        if (breaks) break;
      }
    });
  });
}

test("the id of a request", async () => {
  const headers = { "x-request-id": "mine-7" };
  const body = { model, prompt, max_tokens: 1 };
  assert.equal((await client.completions.create(body, { headers }))._request_id, "mine-7");
  const { request_id } = await client.completions.create({ ...body, stream: true }, { headers }).withResponse();
  assert.equal(request_id, "mine-7");
  const { response, request_id: minted } = await client.completions.create(body).withResponse();
  assert.match(minted, /^\w{24}$/);
  assert.equal(response.headers.get("content-type"), "application/json");
  await assert.rejects(client.completions.create({ ...body, n: 0 }, { headers }), { requestID: "mine-7" });
  assert.equal((await client.models.list().asResponse()).headers.get("x-request-id").length, 24);
});
