// A story in a file, and as a Chrome trace.

const FORMAT = "kaiten-dashboard-1", FILE_BYTES_MAX = 200e6, NUMBER_OF_NOBODY = 2 ** 32 - 1;

// By slot, runs of [first column, columns, owner, kind]; times as they are.
function saved(story, frame) {
  const tracks = [...story.tracks.values()].map((track) => {
    const columns = [], runs = [];
    for (let index = track.oldest; index < track.count; index++) columns.push(track.column(index));
    for (let slot = 0; slot < track.slots; slot++) {
      const ofSlot = [];
      if (track.count) track.runs(slot, track.oldest, track.count, (from, to, number, what) => ofSlot.push([from - track.oldest, to - from, number, what]));
      runs.push(ofSlot);
    }
    return {worker_id: track.workerId, slots: track.slots, columns, runs};
  });
  const owners = [...story.owners.all.values()].map(({sequenceId, number, id, choice, hue, arrived, first, ended, promptTokens, tokensMax}) => ({sequenceId, number, id, choice, hue, arrived, first, ended, promptTokens, tokensMax}));
  const heat = Object.fromEntries(Object.entries(story.heat.kinds).map(([kind, bins]) => [kind, [...bins].map(([bin, counts]) => [bin, [...counts]])]));
  const seen = frame && {...frame, workers: [...frame.workers.values()], sequences: [...frame.sequences.values()], maps: undefined};
  return {format: FORMAT, saved_unix_ms: Date.now(), owners, tracks, heat, frame: seen};
}
// What a file must be: of lists and objects their parts, of all else what it breaks, if anything.
const SLOTS_MAX = 1024, BLOCKS_MAX = 1e7, TRACKS_MAX = 256, TIME_MAX = 8e15;
// Of all tracks; of each there are at least COLUMNS_MIN columns. And seconds of latencies.
const SLOTS_OF_ALL_MAX = 16384, BINS_MAX = 10 * HEAT_BINS;
const number = (value) => Number.isFinite(value) && Math.abs(value) <= TIME_MAX ? "" : "be a number";
const whole = (most, least = 0) => (value) => Number.isInteger(value) && value >= least && value <= most ? "" : `be a whole number of ${least} to ${most}`;
const text = (value) => typeof value === "string" ? "" : "be a text";
const base64 = (value) => { try { return typeof atob(value) === typeof value ? "" : "be a text"; } catch { return "be base64"; } };
const maybe = (shape) => (value, field) => { if (value !== undefined && value !== null) check(value, shape, field); };
const count = whole(2 ** 53), blocksOfGroup = (table) => Array.isArray(table) && table.every(Number.isInteger) ? "" : "be a list of blocks";
const OVER = [{worker_id: maybe(text), stage: text, why: text}];
const SHAPE = {
  owners: [{sequenceId: count, number: maybe(count), id: text, choice: count, hue: whole(360), arrived: number, first: number, promptTokens: number, tokensMax: number}],
  tracks: [{worker_id: text, slots: whole(SLOTS_MAX), runs: [[Array.isArray]], columns: [{at: number, plan: count, step: count, stepUs: number, tokens: number,
    decodes: number, decoded: maybe(number), chunked: number, free: maybe(number), waiting: maybe(number), budget: maybe(number), lease: maybe(number), cached: maybe(number), busy: maybe(number),
    expectedUs: maybe(number), whys: maybe([text]), blocks: maybe([number])}]}],
  heat: {ttft: [Array.isArray], gap: [Array.isArray]},
  frame: maybe({at: number, epoch: count, seq: count, committedSeq: maybe(count), queue: [count], waiting: count,
    configured: {policy: maybe(text), placement: maybe(text), order: maybe(text), victim: maybe(text), admission: maybe(text), mix: maybe(text), cadence: maybe(text)},
    workers: [{worker_id: text, address: maybe(text), slots_max: whole(SLOTS_MAX), block_count: whole(BLOCKS_MAX), block_size: maybe(count), blocks_free: maybe(count), cached_blocks: maybe(base64), host_block_count: maybe(count), host_blocks_used: maybe(count),
      plans: maybe([{steps_answered: count, lease_steps: count}]), passed_over: OVER}],
    sequences: [{sequence_id: count, counts: maybe({tokens: count, computed_tokens: count}), passed_over: maybe(OVER), blocks: maybe([blocksOfGroup]),
      identity: maybe({id: text, choice: maybe(count), priority: maybe(number), arrived_unix_ms: number, prompt_tokens: count, tokens_max: maybe(count)}),
      place: maybe({state: text, worker_id: text, slot: count, preemptions: count})}]}),
};
function check(value, shape, field) {
  const refuse = (rule) => { throw new Error(`${field} must ${rule}`); };
  if (shape === Array.isArray) return Array.isArray(value) && value.every((each) => typeof each === "number" || Array.isArray(each)) || refuse("be a list of numbers");
  if (typeof shape === "function") { const rule = shape(value, field); return rule && refuse(rule); }
  if (Array.isArray(shape)) return Array.isArray(value) ? value.forEach((each, index) => check(each, shape[0], `${field}[${index}]`)) : refuse("be a list");
  if (typeof value !== "object" || value === null) refuse("be an object");
  for (const [name, inner] of Object.entries(shape)) check(value[name], inner, field ? `${field}.${name}` : name);
}
// The rules between the parts.
function checkRuns({slots, columns, runs}, field) {
  if (columns.length > COLUMNS_MAX) throw new Error(`${field}.columns must be at most ${COLUMNS_MAX}`);
  if (runs.length > slots) throw new Error(`${field}.runs must be a list for each of its ${slots} slots at most`);
  runs.forEach((ofSlot, slot) => {
    const isRun = ([from, length, owner, what]) => [from, length, owner, what].every((each) => Number.isInteger(each) && each >= 0) && from + length <= columns.length;
    if (!ofSlot.every(isRun)) throw new Error(`${field}.runs[${slot}] must be runs of its ${columns.length} columns`);
    if (sumOf(ofSlot, ([, length]) => length) > columns.length) throw new Error(`${field}.runs[${slot}] must not overlap`);
  });
}
const sumOf = (list, of) => list.reduce((sum, each) => sum + of(each), 0);
// What it takes to show it, however small the file is.
function checkSizes({tracks, heat, frame}) {
  const sizes = [["tracks", tracks.length, TRACKS_MAX], ["slots of all tracks", sumOf(tracks, ({slots}) => Math.max(1, slots)), SLOTS_OF_ALL_MAX],
    ["heat.ttft", heat.ttft.length, BINS_MAX], ["heat.gap", heat.gap.length, BINS_MAX],
    ["blocks of all workers", sumOf(frame?.workers || [], ({block_count}) => block_count), BLOCKS_MAX]];
  for (const [field, size, most] of sizes) if (size > most) throw new Error(`${field} must be at most ${most}, and are ${size}`);
}
// Error: what is wrong with it.
function loaded(file) {
  if (file?.format !== FORMAT) throw new Error(`this is no file of this page: its format must be ${FORMAT}`);
  check(file, SHAPE, "");
  checkSizes(file);
  file.tracks.forEach((track, index) => checkRuns(track, `tracks[${index}]`));
  const story = new Story("file"), numbers = new Map();
  for (const [index, one] of file.owners.entries()) {
    const number = story.owners.of(one.sequenceId);
    // In older files they have no numbers: none was forgotten.
    numbers.set(one.number ?? index + 1, number);
    Object.assign(story.owners.at(number), one, {number});
  }
  for (const {worker_id, slots, columns, runs} of file.tracks) {
    const track = story.track(worker_id, slots), start = Math.max(0, columns.length - track.cap);
    track.count = columns.length;
    columns.forEach((column, index) => { if (index >= start) track.columns[index % track.cap] = column; });
    runs.forEach((ofSlot, slot) => ofSlot.forEach(([from, count, number, what]) => {
      for (let index = Math.max(from, start); index < from + count; index++) {
        track.owner[(index % track.cap) * slots + slot] = numbers.get(number) ?? NUMBER_OF_NOBODY;
        track.kind[(index % track.cap) * slots + slot] = what;
      }
    }));
  }
  for (const kind of ["ttft", "gap"]) for (const [bin, counts] of file.heat[kind]) {
    check(bin, count, `heat.${kind}`);
    check(counts, [number], `heat.${kind}`);
    // In older files they are fewer.
    story.heat.kinds[kind].set(bin, Uint32Array.from({length: HEAT_ROWS}, (_, row) => counts[row] || 0));
    story.heat.newest = Math.max(story.heat.newest, bin);
  }
  if (file.frame) {
    Object.assign(story.core, file.frame, {workers: new Map(file.frame.workers.map((worker) => [worker.worker_id, worker])), sequences: new Map(file.frame.sequences.map((one) => [one.sequence_id, one]))});
    story.keep();
  }
  return story;
}

// chrome://tracing and ui.perfetto.dev: a process per worker, a thread per slot, times in microseconds.
function chromeTrace(story) {
  const events = [];
  [...story.tracks.values()].forEach((track, pid) => {
    events.push({name: "process_name", ph: "M", pid, args: {name: `worker ${track.workerId}`}});
    // An answer may have been long on its way: no step begins before the one before it ended.
    const began = (index) => {
      const column = track.column(index), before = track.column(index - 1);
      return Math.max(Math.round(column.at * 1000 - Math.max(1, column.stepUs)), before ? Math.round(before.at * 1000) : 0);
    };
    for (let slot = 0; slot < track.slots; slot++) {
      events.push({name: "thread_name", ph: "M", pid, tid: slot, args: {name: `slot ${slot}`}});
      if (track.count) track.runs(slot, track.oldest, track.count, (from, to, number, what) => {
        const owner = story.owners.at(number), start = began(from), end = Math.round(track.column(to - 1).at * 1000);
        events.push({name: owner.id ? nameOf(owner) : `sequence ${owner.sequenceId}`, cat: ["idle", "decode", "prefill", "prefill", "sits out"][what & KIND], ph: "X", pid, tid: slot, ts: start, dur: Math.max(1, end - start),
          args: {sequence_id: owner.sequenceId, iterations: to - from, finished: !!(what & FINISHED), preempted: !!(what & PREEMPTED)}});
      });
    }
    for (let index = track.oldest; index < track.count; index++) {
      const column = track.column(index);
      events.push({name: "tokens", ph: "C", pid, ts: began(index), args: {decode: decodedOf(column), prefill: column.chunked}});
      if (column.waiting !== null) events.push({name: "waiting", ph: "C", pid, ts: began(index), args: {requests: column.waiting}});
    }
  });
  return {traceEvents: events, displayTimeUnit: "ms"};
}
function download(name, content) {
  const link = element("a", {download: name, href: URL.createObjectURL(new Blob([JSON.stringify(content)], {type: "application/json"}))});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
