// What the dashboard's page does with what it is told, as far as it needs no browser.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

const FOLDER = process.env.KAITEN_DASHBOARD;
const source = ["core.js", "panels.js", "files.js"].map((name) => readFileSync(`${FOLDER}/${name}`, "utf8")).join("\n");
const { Story, ArchiveReader, whyWaits, saved, loaded, OWNERS_MAX, TRACKS_GONE_MAX } = vm.runInThisContext(
  `(() => {${source}; return {Story, ArchiveReader, whyWaits, saved, loaded, OWNERS_MAX, TRACKS_GONE_MAX}; })()`);

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
  const stream = readFileSync(`${FOLDER}/stream.js`, "utf8"), asked = [];
  const archived = vm.runInThisContext(`(page, asked) => { ${stream}; ask = async (path) => { asked.push(path); return {json: async () => page}; }; return archived; }`)(
    { data: [{ header: {} }, { record: { unix_ms: 385.05 } }, { record: { unix_ms: 385.93 } }], has_more: false }, asked);
  const { entries } = await archived(100.5, 385.09);
  assert.deepEqual(entries, [[{ header: {} }, { record: { unix_ms: 385.05 } }]]);
  assert.match(asked[0], /since_ms=100&until_ms=386&/);
});
