// What the dashboard's page does with what it is told, as far as it needs no browser.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

const FOLDER = process.env.KAITEN_DASHBOARD;
// `names` of what these files, or this text, say in a world where there is this of a browser.
const page = (world, names, files, source = files.map((name) => readFileSync(`${FOLDER}/${name}.js`, "utf8")).join("\n")) =>
  vm.runInThisContext(`(({${Object.keys(world)}}) => (() => {${source}; return {${names}}; })())`)(world);
const { Story, Heat, ArchiveReader, rate, whyWaits, reasonOf, saved, loaded, chromeTrace, OWNERS_MAX, TRACKS_GONE_MAX } = page({},
  "Story, Heat, ArchiveReader, rate, whyWaits, reasonOf, saved, loaded, chromeTrace, OWNERS_MAX, TRACKS_GONE_MAX", ["core", "panels", "files"]);

const worker = (id, more = {}) => ({ worker_id: id, address: `${id.split(".")[0]}:1`, slots_max: 4, block_count: 8, block_size: 16,
  cached_blocks: "", passed_over: [], plans: [], is_draining: false, is_late: false, ...more });
let seq = 0;
const tell = (story, told) => story.take({ epoch: 1, seq: ++seq, committed_seq: seq, unix_ms: 1000 + seq, ...told });
// An iteration of so many sequences that come and end with it.
const step = (workerId, plan, ids = []) => ({ worker_id: workerId, skipped: 0, is_diff: false, steps: [{ answered_unix_ms: 1000 + seq, step_us: 9,
  plan_id: plan, step: 0, tokens: ids.length, join_slots: ids.map((_, slot) => slot), join_sequence_ids: ids, finished_slots: ids.map((_, slot) => slot) }] });

test("who watches a worker that dies goes on with the next at its address, or with another", () => {
  const story = new Story("live");
  tell(story, { is_snapshot: true, workers: [worker("a.1"), worker("b.1"), worker("c.1")] });
  const wanted = { id: "b.1", address: "b:1" };
  assert.equal(story.follow(null, null), "a.1");
  assert.equal(story.follow(wanted, "b.1"), "b.1");
  tell(story, { steps: [step("b.1", 1)] });
  tell(story, { worker_ids_gone: ["b.1"] });
  assert.equal(story.follow(wanted, "b.1"), "a.1");
  assert.equal(story.follow(wanted, "c.1"), "c.1", "whoever is shown instead is shown on");
  tell(story, { workers: [worker("b.2")] });
  assert.equal(story.follow(wanted, "a.1"), "b.2");
  tell(story, { worker_ids_gone: ["a.1", "b.2", "c.1"] });
  assert.equal(story.follow(wanted, "b.1"), "b.1", "nobody is there: what was seen stays");
});

test("of archives a row that a step gave several tokens is one row with as many", () => {
  const story = new Story("archive"), reader = new ArchiveReader(story);
  const said = (step, told, sequence_ids) => ({ record: { seq: step, unix_ms: step, sequence_ids,
    inputs: [{ unix_ms: step, step: { worker_id: "w.1", plan_id: 1, step, step_us: 9, ...told } }] } });
  reader.take([said(1, { slots: [0, 2], token_counts: [3, 1] }, [7, 7, 7, 8]), said(2, {}), said(3, { slots: [0, 2], token_counts: [] }, [7, 8])]);
  const track = story.tracks.get("w.1");
  assert.deepEqual([0, 1, 2].map((index) => track.column(index).tokens), [4, 4, 2]);
  assert.deepEqual([0, 2].map((slot) => story.owners.at(track.cell(0, slot).owner).sequenceId), [7, 8]);
});

test("of workers that have gone the newest few stay, and all that somebody looks at", () => {
  const story = new Story("live"), kept = () => [...story.tracks.keys()].map((id) => Number(id.slice(2)));
  const boot = (number) => {
    tell(story, { worker_ids_gone: [`w.${number - 1}`], workers: [worker(`w.${number}`)] });
    tell(story, { steps: [step(`w.${number}`, 1)] });
  };
  tell(story, { is_snapshot: true });
  for (let number = 1; number <= 9; number++) boot(number);
  assert.deepEqual(kept(), [6, 7, 8, 9]);
  assert.equal(kept().length, TRACKS_GONE_MAX + 1);
  story.hold(true);
  for (let number = 10; number <= 19; number++) boot(number);
  assert.deepEqual(kept(), [6, 7, 8, 9, 16, 17, 18, 19]);
  story.hold(false);
  boot(20);
  assert.deepEqual(kept(), [17, 18, 19, 20]);
});

test("sequences are forgotten oldest first, but for who is there or looked at", () => {
  const story = new Story("live"), names = () => story.owners.all.size;
  const identity = { id: "default:one", arrived_unix_ms: 1000, prompt_tokens: 3 };
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [{ sequence_id: 1, identity, place: { state: "waiting" } }] });
  let id = 1;
  const run = (count) => { for (let plan = 0; plan < count; plan++) tell(story, { steps: [step("w.1", plan, [++id, ++id, ++id, ++id])] }); };
  run(OWNERS_MAX / 4);
  assert.ok(names() < OWNERS_MAX, "some are forgotten");
  assert.equal(story.tracks.get("w.1").count, OWNERS_MAX / 4, "no iteration is");
  assert.ok(story.owners.numbers.has(1), "who waits is still known");
  assert.ok(!story.owners.numbers.has(2));
  assert.ok(story.owners.numbers.has(id));
  story.hold(true);
  const track = story.tracks.get("w.1"), looksAt = track.cell(track.count - 1, 0).owner, {sequenceId} = story.owners.at(looksAt);
  run(8000);
  assert.ok(names() < 75000, "others are");
  assert.equal(story.owners.at(looksAt).sequenceId, sequenceId, "but nobody who is looked at");
  story.hold(false);
  run(8000);
  assert.equal(story.owners.at(looksAt).id, "forgotten", "until it is not");
  const again = loaded(JSON.parse(JSON.stringify(saved(story, null)))), seen = again.tracks.get("w.1");
  assert.equal(again.owners.at(seen.cell(seen.count - 1, 3).owner).sequenceId, id, "a file has the same owners");
});

test("whoever waits is told what keeps everybody out, and only what does", () => {
  const full = { passed_over: [{ stage: "plan", why: "no_slot" }] }, queue = [1, 2];
  const said = (...workers) => {
    const frame = { queue, sequences: new Map([[1, { place: { state: "waiting" } }], [2, { place: { state: "forking" } }]]),
      workers: new Map(workers.map((one) => [one.worker_id, one])) };
    return [whyWaits(frame, 1), whyWaits({ ...frame, sequences: new Map() }, 2), whyWaits(frame, 2)];
  };
  const turn = ["its turn has not come", "behind those before it", "forks from its first choice"];
  assert.deepEqual(said(), ["no worker is here", "no worker is here", turn[2]]);
  assert.deepEqual(said(worker("a.1")), turn);
  assert.deepEqual(said(worker("a.1", full), worker("b.1")), turn, "another is open");
  assert.equal(said(worker("a.1", full), worker("b.1", { is_late: true }))[1], "every slot is taken, a step of the worker is overdue");
  const short = { passed_over: [{ stage: "lease", why: "prefill" }] };
  assert.deepEqual(said(worker("a.1", short)), turn, "short plans keep nobody out");
});

test("of the archive comes what is before a moment within a millisecond, and nothing after it", async () => {
  const told = { data: [{ header: {} }, { record: { unix_ms: 385.05 } }, { record: { unix_ms: 385.93 } }], has_more: false }, asked = [];
  const fetch = async (path) => { asked.push(path); return { ok: true, json: async () => told }; };
  const { archived } = page({ fetch, sessionStorage: { getItem: () => null } }, "archived", ["stream"]);
  const { entries } = await archived(100.5, 385.09);
  assert.deepEqual(entries, [[{ header: {} }, { record: { unix_ms: 385.05 } }]]);
  assert.match(asked[0], /since_ms=100&until_ms=386&/);
});

// An iteration at a time, of who stays: slot 0 is sequence 1's.
const at = (ms, more = {}) => ({ worker_id: "w.1", skipped: 0, is_diff: false, steps: [{ answered_unix_ms: ms, step_us: 9, plan_id: 1, step: 1,
  tokens: 1, join_slots: [0], join_sequence_ids: [1], ...more }] });
const one = (more = {}) => ({ sequence_id: 1, identity: { id: "default:one", arrived_unix_ms: 1000, prompt_tokens: 3 },
  place: { state: "running", worker_id: "w.1", slot: 0, preemptions: 0 }, ...more });
const counted = (story, kind) => [...story.heat.kinds[kind].values()].reduce((sum, counts) => sum + counts.reduce((a, b) => a + b), 0);

test("a time to first token is of a first token, and a gap of two that were both told", () => {
  const story = new Story("live"), first = { step: 0, chunk_slots: [0], chunk_tokens: [3] };
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [at(60000)] });
  assert.deepEqual([counted(story, "ttft"), counted(story, "gap")], [0, 0], "it had tokens before the page looked");
  tell(story, { steps: [at(60020)] });
  assert.equal(counted(story, "gap"), 1);
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [at(90000)] });
  assert.equal(counted(story, "gap"), 1, "nobody knows what was while the stream was away");
  tell(story, { steps: [{ ...at(95000), skipped: 200 }] });
  assert.equal(counted(story, "gap"), 1, "nor which tokens were skipped");
  const again = new Story("live"), preempted = one({ place: { ...one().place, preemptions: 1 } });
  tell(again, { is_snapshot: true, workers: [worker("w.1")], sequences: [preempted] });
  tell(again, { steps: [at(60000, first)] });
  assert.equal(counted(again, "ttft"), 0, "who computes again may have had its first");
  const fresh = new Story("live");
  tell(fresh, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(fresh, { steps: [at(1500, first)] });
  assert.equal(counted(fresh, "ttft"), 1);
  assert.equal(fresh.owners.at(1).first, 1500);
});

test("whose end went with its leader runs again", () => {
  const story = new Story("live"), start = { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] };
  tell(story, start);
  tell(story, { steps: [at(2000, { finished_slots: [0] })] });
  assert.ok(story.owners.at(1).ended);
  tell(story, { ...start, epoch: 2 });
  tell(story, { steps: [at(3000)] });
  const track = story.tracks.get("w.1");
  assert.deepEqual([track.cell(1, 0).owner, track.cell(1, 0).kind], [1, 1], "it decodes");
});

test("of a plan that nobody saw it is not said that no block is free", () => {
  const story = new Story("live"), plan = { step: 0, lease_steps: 2, blocks_free: 7, waiting: 3 };
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [at(2000, { step: 0 }), at(2010, { plan_id: 2, ...plan }), at(2020, { plan_id: 2 }), at(2030, { plan_id: 4 })] });
  const track = story.tracks.get("w.1");
  assert.deepEqual([0, 1, 2, 3].map((index) => [track.column(index).free, track.column(index).waiting]),
    [[null, null], [7, 3], [7, 3], [null, null]]);
  tell(story, { steps: [at(2040, { ...plan, plan_id: 5, blocks_free: undefined, waiting: undefined })] });
  assert.equal(track.column(4).free, 0, "and none may be");
});

test("steps a second are those of the second before the moment that is looked at", () => {
  const story = new Story("live");
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [...Array(50).keys()].map((step) => at(10000 + 100 * step)) });
  const track = story.tracks.get("w.1");
  assert.equal(rate(track, 12000), "11 steps/s, 11 tokens/s");
  assert.equal(rate(track, 9000), "0 steps/s, 0 tokens/s");
  assert.equal(rate(track, 60000), "0 steps/s, 0 tokens/s");
});

test("what is said of latencies is true of them, and of the moment that is looked at", () => {
  const heat = new Heat();
  for (let second = 0; second < 50; second++) heat.add("gap", 1000 * second, second < 40 ? 20 : 90000);
  assert.ok(heat.quantile("gap", .95, 30, 35000) > 20);
  assert.ok(heat.quantile("gap", .95, 30, 35000) < 30);
  assert.ok(heat.quantile("gap", .95, 30, 49000) > 90000, "also of those that are very long");
  assert.equal(heat.quantile("gap", .95, 30, 300000), null, "nothing was for minutes");
});

test("a track that gets more slots keeps its iterations", () => {
  const story = new Story("archive"), reader = new ArchiveReader(story);
  const said = (step, ...inputs) => ({ record: { seq: step, unix_ms: step, inputs: inputs.map((input) => ({ unix_ms: step, ...input })) } });
  const plan = (id, more) => ({ plan: { worker_id: "w.1", plan_id: id, lease_steps: 1, leave_slots: [], join_slots: [], admitted: [], preempted: [], ...more } });
  const answer = (id, slots) => ({ step: { worker_id: "w.1", plan_id: id, step: 0, step_us: 9, slots } });
  reader.take([{ header: { epoch: 1, policy: "fair" } }, said(1, plan(1, { join_slots: [0], admitted: [5] })), said(2, answer(1, [0])),
    said(3, plan(2, { join_slots: [3], admitted: [6] })), said(4, answer(2, [0, 3]))]);
  const track = story.tracks.get("w.1"), of = (index, slot) => story.owners.at(track.cell(index, slot).owner).sequenceId;
  assert.deepEqual([track.count, of(0, 0), of(1, 0), of(1, 3)], [2, 5, 5, 6]);
  assert.equal(story.core.seq - story.core.committedSeq, 0, "what is archived is committed");
  reader.take([said(5, { worker_lost: "w.1" }), said(6, plan(1, { join_slots: [1], admitted: [7] })), said(7, answer(1, [1]))]);
  assert.deepEqual([0, 1, 3].map((slot) => track.cell(2, slot).owner && of(2, slot)), [0, 7, 0], "it came back with nobody");
  reader.take([{ header: { epoch: 2, policy: "fair" } }, said(1, plan(9, { join_slots: [2], admitted: [8] })), said(2, answer(9, [2]))]);
  assert.deepEqual([1, 2].map((slot) => track.cell(3, slot).owner && of(3, slot)), [0, 8], "a new leader begins with nobody");
});

test("a reason has the name of nothing else", () => {
  assert.equal(reasonOf({ why: "constructor" }), "constructor");
});

const file = () => {
  const story = new Story("live");
  tell(story, { is_snapshot: true, configured: { policy: "fair" }, workers: [worker("w.1")], sequences: [one({ blocks: [[0, 1]] })], queue: { sequence_ids: [], length: 0 } });
  tell(story, { steps: [at(1500, { step: 0, lease_steps: 2, chunk_slots: [0], chunk_tokens: [3] }), at(1510)] });
  return JSON.parse(JSON.stringify(saved(story, story.frames.at(-1))));
};
test("a file is read as it was saved, an older one, too", () => {
  const given = file(), again = loaded(given);
  assert.equal(again.tracks.get("w.1").count, 2);
  assert.equal(again.frames.at(-1).configured.policy, "fair");
  given.heat.gap = given.heat.gap.map(([bin, counts]) => [bin, counts.slice(0, 36)]);
  delete given.owners[0].number;
  assert.equal(loaded(given).heat.quantile("gap", .5, 30, 1510) > 10, true);
});

test("of a file that is none of this page's it is said what is wrong, and nothing of it is shown", () => {
  const wrong = (change, said) => {
    const given = file();
    change(given);
    assert.throws(() => loaded(JSON.parse(JSON.stringify(given))), new RegExp(said));
  };
  assert.throws(() => loaded(null), /format must be kaiten-dashboard-1/);
  wrong((given) => { given.format = "kaiten-dashboard-2"; }, "format must be kaiten-dashboard-1");
  wrong((given) => { delete given.owners; }, "^Error: owners must be a list");
  wrong((given) => { given.owners[0].hue = "red"; }, "owners\\[0\\].hue must be a whole number of 0 to 360");
  wrong((given) => { given.owners[0].id = { toString: 1 }; }, "owners\\[0\\].id must be a text");
  wrong((given) => { given.tracks[0].slots = 1e9; }, "tracks\\[0\\].slots must be a whole number of 0 to 1024");
  wrong((given) => { given.tracks[0].runs[0] = [[0, 1e15, 1, 1]]; }, "tracks\\[0\\].runs\\[0\\] must be runs of its 2 columns");
  wrong((given) => { given.tracks[0].columns[1] = null; }, "tracks\\[0\\].columns\\[1\\] must be an object");
  wrong((given) => { given.tracks[0].columns[1].at = 1e300; }, "columns\\[1\\].at must be a number");
  wrong((given) => { given.heat = { ["__proto__x"]: [] }; }, "heat.ttft must be a list");
  wrong((given) => { given.heat.ttft = [["x", []]]; }, "heat.ttft\\[0\\] must be a list of numbers");
  wrong((given) => { given.frame.workers[0].block_count = 1e12; }, "frame.workers\\[0\\].block_count must be");
  wrong((given) => { given.frame.sequences[0].blocks = [7]; }, "blocks\\[0\\] must be a list of blocks");
  wrong((given) => { given.frame.configured.policy = { toString: 1 }; }, "frame.configured.policy must be a text");
  wrong((given) => { given.frame.workers[0].host_block_count = { toString: 1 }; }, "frame.workers\\[0\\].host_block_count must be");
  wrong((given) => { given.frame.workers[0].cached_blocks = "#"; }, "cached_blocks must be base64");
  wrong((given) => { given.frame.committedSeq = { toString: 1 }; }, "frame.committedSeq must be");
  for (const name of ["lease", "cached", "expectedUs", "busy"]) wrong((given) => { given.tracks[0].columns[0][name] = { toString: 1 }; }, `columns\\[0\\].${name} must be a number`);
});

test("a small file does not take a page's memory or time", () => {
  const wrong = (change, said) => {
    const given = file();
    change(given);
    assert.throws(() => loaded(given), new RegExp(said));
  };
  wrong((given) => { given.tracks = Array(256).fill({ ...given.tracks[0], slots: 1024 }); }, "slots of all tracks must be at most 16384, and are 262144");
  wrong((given) => { given.frame.workers = Array(11).fill({ ...given.frame.workers[0], block_count: 1e6 }); }, "blocks of all workers must be at most 10000000");
  wrong((given) => { given.heat.gap = Array(1e5).fill([1, []]); }, "heat.gap must be at most 1200");
  wrong((given) => { given.tracks[0].runs[0] = Array(1e5).fill([0, 2, 1, 1]); }, "runs\\[0\\] must not overlap");
});

test("moments are kept for less memory than a page may take, however many share a prompt", () => {
  const story = new Story("live"), shared = [...Array(4000).keys()];
  const all = [...Array(256).keys()].map((id) => ({ ...one(), sequence_id: id + 1, tables: [{ skipped: 0, kept: 0, block_ids: shared }] }));
  tell(story, { is_snapshot: true, workers: [worker("w.1", { block_count: 4000 })], sequences: all });
  for (let second = 1; second < 60; second++) tell(story, { unix_ms: 1000 * second });
  const bytes = story.frames.length * 256 * 4000 * 4;
  assert.ok(bytes < 65e6, `${story.frames.length} frames`);
});

test("many workers share the room that a few have", () => {
  const story = new Story("live"), ids = [...Array(64).keys()].map((id) => `w.${id}`);
  tell(story, { is_snapshot: true, workers: ids.map((id) => worker(id, { slots_max: 64 })) });
  for (const id of ids) tell(story, { steps: [step(id, 1)] });
  const cells = [...story.tracks.values()].reduce((sum, track) => sum + track.cap * track.slots, 0);
  assert.ok(cells <= 6.1e6, `${cells} cells`);
  tell(story, { steps: [{ ...step("gone.1", 1), skipped: 3, steps: [] }] });
  assert.equal(story.tracks.has("gone.1"), false, "of whom no iteration was told there is none");
});

test("of a row that had several tokens in a step all are counted", () => {
  const story = new Story("live"), two = { join_slots: [0, 1], join_sequence_ids: [1, 2], chunk_slots: [1], chunk_tokens: [5], tokens: 4 };
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [at(1500, { step: 0, lease_steps: 1, ...two })] });
  const told = chromeTrace(story).traceEvents.find(({ name }) => name === "tokens");
  assert.deepEqual({ ...told.args }, { decode: 3, prefill: 5 });
});

const until = async (isSo) => { for (let turns = 0; !isSo(); turns++) { assert.ok(turns < 1e5, `never ${isSo}`); await new Promise(setImmediate); } };
// A gateway's answer in Safari, whose streams are not iterable: these parts, and then nothing.
const answer = (parts, { signal, isOver } = {}) => ({ ok: true, body: { pipeThrough: () => ({ getReader: () => ({
  read: () => parts.length ? Promise.resolve({ done: false, value: parts.shift() }) : isOver ? Promise.resolve({ done: true })
    : new Promise((_, fail) => signal.addEventListener("abort", () => fail(signal.reason))),
  cancel: async () => {} }) }) } });
const timed = () => {
  const timers = new Map();
  let made = 0;
  return { setTimeout: (run, ms) => { timers.set(++made, { run, ms }); return made; }, clearTimeout: (id) => timers.delete(id),
    due: (wanted) => { const [[id, { run }], ...others] = [...timers].filter(([, { ms }]) => ms === wanted); timers.delete(id); assert.equal(others.length, 0); run(); } };
};

test("a gateway that says nothing more, though its connection stands, is away, and is asked again", async () => {
  const { due, ...timers } = timed(), states = [], told = [];
  const fetch = async (_, { signal }) => answer(['data: {"seq": ', '1}\n\n: ping\n\n'], { signal });
  const { follow } = page({ fetch, sessionStorage: { getItem: () => null }, document: { hidden: false, addEventListener() {} }, ...timers }, "follow", ["stream"]);
  follow((one) => told.push(one.seq), (...state) => states.push(state));
  await until(() => told.length);
  due(20000);
  await until(() => states.length > 1);
  assert.deepEqual(states, [["live", ""], ["away", "nothing was told for 20 s"]]);
  await new Promise(setImmediate);
  due(250);
  await until(() => told.length > 1);
  assert.deepEqual(states.at(-1), ["live", ""]);
});

const tryPage = readFileSync(`${FOLDER}/../try.html`, "utf8");
const said = (name) => tryPage.match(new RegExp(`^async function\\*? ${name}\\([^]*?^}$`, "m"))[0];
test("an answer is read where streams are not iterable", async () => {
  const { events } = page({}, "events", [], said("events")), found = [];
  for await (const event of events(answer(['event: a\ndata: {"n": 1}\n', '\nevent: b\ndata: {"n": 2}\n\n'], { isOver: true }))) found.push(event.n);
  assert.deepEqual(found, [1, 2]);
});

test("a button that is pressed twice has its own name again", async () => {
  const run = [], navigator = { clipboard: { writeText: async () => {} } }, button = { textContent: "Copy as curl", dataset: {} };
  const { copied } = page({ navigator, setTimeout: (one) => run.push(one) }, "copied", [], said("copied"));
  await copied(button, "one");
  await copied(button, "two");
  assert.equal(button.textContent, "Copied");
  run.forEach((one) => one());
  assert.equal(button.textContent, "Copy as curl");
});

test("what a request's time went on is not asked while nobody looks", async () => {
  const asked = [], heard = [], choice = { index: 0, ms: 1, intervals: [] };
  const made = () => ({ dataset: {}, style: {}, append() {}, replaceChildren() {}, focus() {} }), things = {};
  const document = { hidden: true, addEventListener: (_, one) => heard.push(one), createElement: made, getElementById: (id) => things[id] ||= made() };
  const fetch = async (path) => { asked.push(path); return { ok: true, json: async () => ({ choices: [choice] }) }; };
  const { Drawer } = page({ document, fetch, sessionStorage: { getItem: () => null }, hue: () => "", milliseconds: String, setTimeout() {}, clearTimeout() {} },
    "Drawer", ["panels", "stream"]);
  const story = new Story("live");
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  new Drawer(() => story, () => story.frames.at(-1)).open(1, null);
  await until(() => heard.length);
  assert.deepEqual(asked, []);
  document.hidden = false;
  heard.forEach((one) => one());
  await until(() => asked.length);
  assert.match(asked[0], /^v1\/requests\/one\/explain/);
});

test("where iterations may be missing before one, that one says so", () => {
  const story = new Story("live"), start = { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] };
  const marks = () => { const track = story.tracks.get("w.1"); return [...Array(track.count).keys()].map((index) => track.column(index).isAfterUntold); };
  tell(story, start);
  tell(story, { steps: [{ ...at(2000), steps: [...at(2000).steps, ...at(2010).steps] }] });
  tell(story, { steps: [at(2020)] });
  assert.deepEqual(marks(), [false, false, false]);
  tell(story, { ...start, epoch: 2 });
  tell(story, { steps: [at(3000)] });
  tell(story, { steps: [at(3010)] });
  tell(story, { steps: [{ ...at(4000), skipped: 200 }] });
  tell(story, { workers: [worker("w.1", { slots_max: 9 })], steps: [at(4010)] });
  assert.deepEqual(marks().slice(3), [true, false, true, false]);
});

test("a leader whose clock was set back begins anew", () => {
  const story = new Story("live"), start = { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] };
  tell(story, { ...start, unix_ms: 9e6 });
  tell(story, { unix_ms: 9e6, steps: [at(9e6), at(9e6 + 20)] });
  tell(story, { ...start, epoch: 2, unix_ms: 2e6 });
  tell(story, { unix_ms: 2e6 + 1, steps: [at(2e6), at(2e6 + 20)] });
  assert.equal(counted(story, "gap"), 1);
  assert.equal(story.frame(2e6 + 1).at, 2e6 + 1);
  assert.equal(rate(story.tracks.get("w.1"), 2e6 + 20), "2 steps/s, 2 tokens/s");
});

test("whose end went with its leader runs again, though the next one told of others first", () => {
  const story = new Story("live"), start = { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] };
  tell(story, start);
  tell(story, { steps: [at(2000, { finished_slots: [0] })] });
  tell(story, { ...start, epoch: 2, sequences: [] });
  tell(story, { sequences: [one()] });
  tell(story, { steps: [at(3000)] });
  assert.equal(story.tracks.get("w.1").cell(1, 0).kind, 1, "it decodes");
});

test("a comparison is of a burst that was seen whole", async () => {
  const story = new Story("live"), world = { document: { hidden: false }, performance, setTimeout: setImmediate };
  const { ended } = page(world, "ended", ["panels", "compare"]);
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  const seen = ended(story, ["one"], story.untold, () => {});
  tell(story, { steps: [at(2000, { finished_slots: [0] })] });
  assert.equal((await seen).length, 1);
  const unseen = ended(story, ["another"], story.untold, () => {});
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [] });
  await assert.rejects(unseen, /not every iteration of the burst was told/);
});

// What is drawn: rectangles, each with its colour; and images.
function canvas(clientWidth, clientHeight) {
  const drawn = [], images = [], context = new Proxy({}, { get: (of, name) => of[name] ?? ({
    fillRect: (...box) => drawn.push([of.fillStyle, ...box]), measureText: () => ({ width: 1e6 }),
    createImageData: (width, height) => { assert.ok(width && height); return { width, height, data: new Uint8ClampedArray(4 * width * height) }; },
    putImageData: (image) => images.push(image) }[name] ?? (() => {})) });
  return { clientWidth, clientHeight, width: 0, height: 0, getContext: () => context, drawn, images };
}
const COLOURS = { "--bad-light": "#ff0000", "--text-light": "#000001", "--soft-light": "#eeeeee", "--dim-light": "#777777", "--page-light": "#ffffff" };
function ribbonPage(ratio = 1) {
  const made = page({ document: { documentElement: null, createElement: () => canvas(6, 6) }, devicePixelRatio: ratio, matchMedia: () => ({ matches: false }),
    getComputedStyle: () => ({ getPropertyValue: (name) => COLOURS[name] || "#123456" }) }, "Ribbon, BlockMap, readPaint, hue, pixel, GUTTER", ["core", "ribbon"]);
  made.readPaint();
  return made;
}

test("under every step is its own budget, as far as steps come near it, and what is missing before it", () => {
  const { Ribbon, GUTTER } = ribbonPage(), story = new Story("live"), plan = (step) => ({ step: 0, lease_steps: 1, ...step });
  tell(story, { is_snapshot: true, workers: [worker("w.1", { step_tokens_max: 16 })], sequences: [one()] });
  tell(story, { steps: [at(1500, plan({ budget_tokens: 16, chunk_slots: [0], chunk_tokens: [7] })), at(1510, plan({ plan_id: 2, budget_tokens: 8 }))] });
  const lines = () => {
    const drawn = canvas(GUTTER + 16, 372), ribbon = new Ribbon(drawn), track = story.tracks.get("w.1");
    ribbon.draw(track, track.count);
    return [drawn.drawn.filter(([colour, , , , tall]) => colour === "#ff0000" && tall === 1).map(([, x, y]) => [x - GUTTER, y]),
      drawn.drawn.filter(([colour]) => colour === "#000001").map(([, x]) => x - GUTTER)];
  };
  const [[[x, y], [otherX, otherY], ...others], marks] = lines();
  assert.deepEqual([x, otherX, otherY - y, others, marks], [0, 8, 46 / 2, [], []]);
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: [one()] });
  tell(story, { steps: [at(1600, plan({ plan_id: 3, budget_tokens: 4000 }))] });
  assert.deepEqual(lines(), [[], [8 - 1]], "where nobody comes near one there is no line");
});

test("of a pool with more blocks than there are pixels all are shown, several to a cell", () => {
  const { BlockMap, hue, pixel } = ribbonPage(), owner = { hue: 120 }, owners = { at: () => owner };
  const drawn = canvas(100, 50), map = new BlockMap(drawn), pool = (count) => ({ owner: new Uint32Array(count), held: new Uint8Array(count), cached: new Uint8Array(count) });
  map.draw(pool(0), owners, 0);
  const of = pool(12000);
  of.owner[11998] = of.held[11998] = of.cached[4] = 1;
  map.draw(of, owners, 0);
  const pixels = new Uint32Array(drawn.images.at(-1).data.buffer), found = (colour) => [...pixels.keys()].filter((at) => pixels[at] === pixel(colour));
  assert.deepEqual(found(hue(owner, false)), [3999]);
  assert.deepEqual(found("#777777"), [1]);
  assert.equal(found("#eeeeee").length, 3998);
  assert.deepEqual([map.at(12000, 99.5, 39.5), map.at(12000, 0, 40.5)], [3999 * 3, null]);
});

test("of long tables it is said how much of them is not there", () => {
  const made = () => ({ dataset: {}, style: {}, children: [], append(...some) { this.children.push(...some); }, contains: () => false, matches: () => false,
    replaceChildren(...some) { this.children = some; } }), things = {};
  const document = { createElement: made, getElementById: (id) => things[id] ||= made(), activeElement: null };
  const { showQueue, showRunning } = page({ document, hue: () => "", milliseconds: String, shortName: (owner) => owner.id }, "showQueue, showRunning", ["panels"]);
  const story = new Story("live"), last = (id) => [things[id].children.length, things[id].children.at(-1).children[0].textContent];
  const many = [...Array(300).keys()].map((id) => ({ ...one(), sequence_id: id + 1, place: { state: id < 150 ? "running" : "waiting", worker_id: "w.1", slot: id } }));
  const show = () => { const frame = story.frames.at(-1); showQueue(story, frame, false); showRunning(story, frame, "w.1", false); };
  tell(story, { is_snapshot: true, workers: [worker("w.1")], sequences: many, queue: { sequence_ids: many.slice(150).map((each) => each.sequence_id), length: 4096 } });
  show();
  assert.deepEqual([last("queue"), last("running")], [[101, "and 3996 more"], [101, "and 50 more"]]);
  tell(story, { queue: { sequence_ids: [300], length: 1 }, sequence_ids_gone: many.slice(100, 299).map((each) => each.sequence_id) });
  show();
  assert.deepEqual([things.queue.children.length, things.running.children.length], [1, 100]);
  tell(story, { queue: { sequence_ids: [], length: 0 } });
  show();
  assert.deepEqual(last("queue"), [1, "nobody waits"]);
});

test("whatever a part of a file is, it is refused by a rule or can be shown", () => {
  const made = () => ({ ...canvas(200, 60), dataset: {}, style: {}, append() {}, replaceChildren() {}, setAttribute() {}, focus() {}, contains: () => false, matches: () => false,
    set textContent(value) { this.text = `${value}`; } }), things = {}, view = { isPaused: true };
  const document = { createElement: made, getElementById: (id) => things[id] ||= made(), activeElement: null, documentElement: null };
  const browser = { document, devicePixelRatio: 1, matchMedia: () => ({ matches: false }), getComputedStyle: () => ({ getPropertyValue: (name) => COLOURS[name] || "#123456" }), setTimeout() {}, clearTimeout() {} };
  const main = readFileSync(`${FOLDER}/main.js`, "utf8"), of = (name) => main.match(new RegExp(`^function ${name}\\([^]*?^}$`, "m"))[0];
  const source = [...["core", "ribbon", "panels", "files"].map((name) => readFileSync(`${FOLDER}/${name}.js`, "utf8")), main.match(/^const clock = .*$/m)[0], of("words"), of("panels"),
    "const ribbon = new Ribbon($('ribbon')), blockMap = new BlockMap($('blocks')), heats = [new HeatMap($('ttft'), 'ttft'), new HeatMap($('gap'), 'gap')];",
    "const drawer = new Drawer(() => view.story, () => view.frame), track = () => view.track, frameNow = () => view.frame, live = {}, wantWorker = () => {}; let isDirty, tablesAt; readPaint();",
    "function look() { tablesAt = -1000; ribbon.draw(track(), view.head); panels(track(), 0); }"].join("\n");
  const { loaded, words, drawer, look } = page({ ...browser, view }, "loaded, words, drawer, look", [], source);
  const show = (story) => {
    const track = [...story.tracks.values()][0];
    Object.assign(view, { story, track, frame: story.frames.at(-1) || null, workerId: "w.1", head: track?.count || 0 });
    look();
    for (let index = track?.oldest; index < track?.count; index++) words({ index, slot: 0 });
    for (const { sequenceId } of story.owners.all.values()) { drawer.open(sequenceId, null); drawer.close(false); }
    JSON.stringify([chromeTrace(story), saved(story, view.frame)]);
  };
  const story = new Story("live"), over = [{ worker_id: "w.1", stage: "plan", why: "no_slot" }], full = worker("w.1", { host_block_count: 5, host_blocks_used: 2, passed_over: over,
    cached_blocks: "AQ==", plans: [{ plan_id: 1, lease_steps: 3, steps_answered: 1 }] }), held = { counts: { tokens: 4, computed_tokens: 3 }, passed_over: over, tables: [{ skipped: 1, kept: 1, block_ids: [1, 2] }] };
  tell(story, { is_snapshot: true, configured: { policy: "fair", mix: "x" }, workers: [full], sequences: [one(held), { ...one(held), sequence_id: 2, place: { state: "waiting", worker_id: "", slot: 0, preemptions: 1 } }], queue: { sequence_ids: [2], length: 9 } });
  tell(story, { steps: [at(1500, { step: 0, lease_steps: 2, chunk_slots: [0], chunk_tokens: [3], expected_us: 9, cached_tokens: 1, blocks_freed: 1, preempted_whys: ["blocks"] }), at(1510), at(1520)] });
  const given = JSON.parse(JSON.stringify(saved(story, story.frames.at(-1)))), paths = [];
  const walk = (part, path) => { for (const name of Object.keys(part).slice(0, Array.isArray(part) ? 4 : 99)) { paths.push([...path, name]); if (part[name] && typeof part[name] === "object") walk(part[name], [...path, name]); } };
  walk(given, []);
  show(loaded(given));
  for (const path of paths) for (const wrong of [{ toString: 1 }, [{ toString: 1 }], -1, 1e308, 1.5, "x", "__proto__", null, true, 2 ** 53, undefined]) {
    const file = structuredClone(given), part = path.slice(0, -1).reduce((inner, name) => inner[name], file);
    part[path.at(-1)] = wrong;
    let read = null;
    try { read = loaded(JSON.parse(JSON.stringify(file))); } catch (error) { assert.match(error.message, / must /, `${path}: ${JSON.stringify(wrong)}`); }
    if (read) assert.doesNotThrow(() => show(read), `${path}: ${JSON.stringify(wrong)}`);
  }
});
