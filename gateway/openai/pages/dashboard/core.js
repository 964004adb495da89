"use strict";
// What the leader says, put together: the core as it is (`Core`), and its iterations (`Track`). No page in here.

const IDLE = 0, DECODE = 1, PREFILL = 2, FIRST = 3, WAITS = 4;   // FIRST: the prompt is done, and gave a token
const FINISHED = 16, PREEMPTED = 32, KIND = 15;
const CELLS_MAX = 1.5e6, CELLS_OF_ALL_MAX = 6e6, COLUMNS_MAX = 12000, COLUMNS_MIN = 1000;
const OWNERS_MAX = 60000, OWNERS_KEPT = 45000, TRACKS_GONE_MAX = 3;
const FRAMES_MAX = 240, FRAME_MS = 500, FRAMES_BYTES_MAX = 64e6, SET_BACK_MS = 5000;

// Whose it was is known no more.
const FORGOTTEN = Object.freeze({sequenceId: 0, number: 0, id: "forgotten", choice: 0, hue: 0, arrived: 0, first: 0, last: 0, hasBegun: true, ended: true,
  promptTokens: 0, tokensMax: 0});
// Sequences by small numbers, from 1 and never again, oldest first; of each what is known of its request.
class Owners {
  constructor() { this.numbers = new Map(); this.all = new Map(); this.requests = new Map(); this.made = this.asked = 0; }
  of(sequenceId) {
    let number = this.numbers.get(sequenceId);
    if (number === undefined) {
      number = ++this.made;
      this.numbers.set(sequenceId, number);
      this.all.set(number, {sequenceId, number, id: "", choice: 0, hue: hueOf(number), arrived: 0, first: 0, last: 0, hasBegun: false, ended: false,
        promptTokens: 0, tokensMax: 0});
    }
    return number;
  }
  at(number) { return this.all.get(number) || FORGOTTEN; }
  // Choices of a request have its colour.
  name(sequenceId, identity) {
    const owner = this.at(this.of(sequenceId));
    if (owner.id) return;
    if (!this.requests.has(identity.id)) this.requests.set(identity.id, ++this.asked);
    Object.assign(owner, {id: identity.id, choice: identity.choice || 0, arrived: identity.arrived_unix_ms,
      promptTokens: identity.prompt_tokens, tokensMax: identity.tokens_max || 0, hue: hueOf(this.requests.get(identity.id))});
  }
  // The oldest, until so many are left; of those for whom `isSpared`, none.
  forget(kept, isSpared) {
    for (const [number, {sequenceId, id}] of this.all) {
      if (this.all.size <= kept) break;
      if (isSpared(number, sequenceId)) continue;
      this.all.delete(number);
      this.numbers.delete(sequenceId);
      this.requests.delete(id);
    }
  }
}
// Neighbours are far apart.
function hueOf(number) { return Math.round((number * 137.508 + 20) % 360); }

// The iterations of one worker: columns of one cell per slot, the newest so many.
class Track {
  constructor(workerId, slots, owners, cells = CELLS_MAX) {
    Object.assign(this, {workerId, slots, owners, cells, count: 0, rows: new Uint32Array(slots), untold: 0});
    this.cap = Math.max(COLUMNS_MIN, Math.min(COLUMNS_MAX, Math.floor(cells / slots)));
    this.owner = new Uint32Array(this.cap * slots);
    this.kind = new Uint8Array(this.cap * slots);
    this.chunk = new Uint16Array(this.cap * slots);
    this.columns = new Array(this.cap);
  }
  get newestAt() { return this.column(this.count - 1)?.at || 0; }
  get oldest() { return Math.max(0, this.count - this.cap); }
  column(index) { return index < this.oldest || index >= this.count ? null : this.columns[index % this.cap]; }
  cell(index, slot) {
    const at = (index % this.cap) * this.slots + slot;
    return {owner: this.owner[at], kind: this.kind[at], chunk: this.chunk[at]};
  }
  clear() { this.rows.fill(0); }
  // Of the newest iteration at this moment; -1: all are after it.
  indexAt(at) {
    let low = this.oldest, high = this.count;
    while (low < high) { const middle = (low + high) >> 1; if (this.column(middle).at > at) high = middle; else low = middle + 1; }
    return low > this.oldest ? low - 1 : -1;
  }
  // These iterations in a track of its own, numbered from `number` on.
  part(first, end, slots = this.slots, number = 0) {
    const part = new Track(this.workerId, slots, this.owners, this.cells);
    Object.assign(part, {count: number, untold: this.untold});
    for (let index = first; index < end; index++, part.count++) {
      const from = (index % this.cap) * this.slots, to = part.count % part.cap;
      for (const name of ["owner", "kind", "chunk"]) part[name].set(this[name].subarray(from, from + this.slots), to * slots);
      part.columns[to] = this.column(index);
    }
    return part;
  }
  leave(slot) { this.rows[slot] = 0; }
  join(slot, sequenceId) { if (slot < this.slots) this.rows[slot] = this.owners.of(sequenceId); }

  // One step of whoever has a row. `chunks`: tokens by slot; `tokenless`: slots.
  push(column, chunks, tokenless, finished, preempted, heat) {
    const index = this.count++, base = (index % this.cap) * this.slots, owners = this.owners;
    let decodes = 0, firsts = 0, chunked = column.chunkTokens || 0, busy = 0;
    for (const sequenceId of preempted) this.mark(index - 1, this.owners.of(sequenceId), PREEMPTED);
    for (let slot = 0; slot < this.slots; slot++) {
      const number = this.rows[slot], owner = owners.at(number);
      let kind = IDLE, chunk = 0;
      if (number && !owner.ended) {
        const hasToken = !tokenless.has(slot);
        if (chunks.has(slot)) { kind = hasToken ? FIRST : PREFILL; chunk = chunks.get(slot); chunked += chunk; firsts += hasToken; }
        else if (hasToken) { kind = DECODE; decodes++; }
        else kind = WAITS;
        if (hasToken) {
          if (owner.last) heat.add("gap", column.at, column.at - owner.last);
          else if (kind === FIRST && !owner.hasBegun && owner.arrived) heat.add("ttft", owner.first = column.at, column.at - owner.arrived);
          owner.hasBegun = true;
          owner.last = column.at;
        }
      }
      if (kind !== IDLE) busy++;
      this.owner[base + slot] = kind === IDLE ? 0 : number;
      this.kind[base + slot] = kind;
      this.chunk[base + slot] = Math.min(chunk, 65535);
    }
    for (const slot of finished) {
      this.kind[base + slot] |= FINISHED;
      const owner = owners.all.get(this.rows[slot]);
      if (owner) owner.ended = true;
    }
    // What is left out is as its plan said with its first step.
    const before = this.column(index - 1), plan = before?.plan === column.plan ? before : null;
    if (column.step) Object.assign(column, {free: plan?.free ?? null, waiting: plan?.waiting ?? null, budget: plan?.budget || column.budget, lease: plan?.lease ?? 0});
    this.columns[index % this.cap] = {...column, decodes, decoded: column.tokens - firsts, chunked, busy, finished: finished.length, preempted: preempted.length};
  }
  mark(index, number, flag) {
    if (index < this.oldest) return;
    const base = (index % this.cap) * this.slots;
    for (let slot = 0; slot < this.slots; slot++) if (this.owner[base + slot] === number) this.kind[base + slot] |= flag;
  }
  // Runs of a slot between two columns: the same owner doing the same.
  runs(slot, first, last, tell) {
    const {cap, slots, owner, kind} = this;
    let start = first, at = (first % cap) * slots + slot, number = owner[at], what = kind[at];
    for (let index = first + 1; index <= last; index++) {
      at = (index % cap) * slots + slot;
      const isEnd = index === last;
      if (!isEnd && owner[at] === number && kind[at] === what && !(what & ~KIND)) continue;
      if (number) tell(start, index, number, what);
      if (!isEnd) { start = index; number = owner[at]; what = kind[at]; }
    }
  }
}

// Of whoever decodes; a row may have several. Older files count rows.
const decodedOf = ({decoded, decodes}) => decoded ?? decodes;

// Latencies by time and size: bins of a second, and half powers of two from a quarter of a millisecond on.
const HEAT_BINS = 120, HEAT_ROWS = 48;
class Heat {
  constructor() { this.kinds = {ttft: new Map(), gap: new Map()}; this.newest = 0; }
  add(kind, at, ms) {
    const bin = Math.floor(at / 1000), bins = this.kinds[kind];
    let counts = bins.get(bin);
    if (!counts) {
      bins.set(bin, counts = new Uint32Array(HEAT_ROWS));
      if (bin > this.newest) this.newest = bin;
      for (const old of bins.keys()) { if (old > this.newest - HEAT_BINS) break; bins.delete(old); }
    }
    counts[Heat.row(ms)]++;
  }
  static row(ms) { return Math.max(0, Math.min(HEAT_ROWS - 1, Math.floor(2 * Math.log2(Math.max(ms, .25) / .25)))); }
  static msOf(row) { return .25 * 2 ** (row / 2); }
  // The size below which a share of the seconds before a moment is.
  quantile(kind, share, seconds, now) {
    const last = Math.floor(now / 1000);
    const sums = new Float64Array(HEAT_ROWS);
    let all = 0;
    for (const [bin, counts] of this.kinds[kind])
      if (bin > last - seconds && bin <= last) for (let row = 0; row < HEAT_ROWS; row++) { sums[row] += counts[row]; all += counts[row]; }
    let seen = 0;
    for (let row = 0; row < HEAT_ROWS; row++) if ((seen += sums[row]) >= all * share && all) return Heat.msOf(row + 1);
    return null;
  }
}

class Story {
  constructor(name) {
    Object.assign(this, {name, owners: new Owners(), tracks: new Map(), heat: new Heat(), frames: [], lost: 0, untold: 0, held: null, ownersMax: OWNERS_MAX});
    this.core = {epoch: 0, seq: 0, committedSeq: 0, at: 0, configured: {}, workers: new Map(), sequences: new Map(), rows: new Map(), queue: [],
      waiting: 0};
  }
  track(workerId, slots) {
    let track = this.tracks.get(workerId);
    const cells = Math.min(CELLS_MAX, CELLS_OF_ALL_MAX / Math.max(1, this.core.workers.size, this.tracks.size));
    if (!track) this.tracks.set(workerId, track = new Track(workerId, slots, this.owners, cells));
    else if (track.slots < slots) this.tracks.set(workerId, track = track.part(track.oldest, track.count, slots, track.oldest));
    return track;
  }
  // Somebody looks at it as it is: what there is now stays, but for what newer iterations take the place of.
  hold(isHeld) { this.held = isHeld ? new Set(this.tracks.keys()) : null; }
  // A worker that starts again is another: of those that have gone, the newest few stay.
  dropTracks(newest) {
    const gone = [...this.tracks.values()].filter(({workerId}) => workerId !== newest && !this.core.workers.has(workerId) && !this.held?.has(workerId));
    gone.sort((one, other) => other.newestAt - one.newestAt);
    for (const {workerId} of gone.slice(TRACKS_GONE_MAX)) this.tracks.delete(workerId);
  }
  // Whose iterations to show: the one that was wanted, or what came after it at its address, or who was shown, or anybody.
  follow(wanted, shown) {
    const {workers} = this.core, isHere = (id) => workers.has(id);
    if (!workers.size) return this.tracks.has(shown) ? shown : this.tracks.keys().next().value ?? null;
    const atAddress = [...workers.values()].find(({address}) => address && address === wanted?.address);
    return [wanted?.id, atAddress?.worker_id, shown].find(isHere) ?? workers.keys().next().value;
  }
  frame(at) {
    for (let index = this.frames.length - 1; index >= 0; index--) if (this.frames[index].at <= at) return this.frames[index];
    return this.frames[0] || null;
  }

  // One event of /v1/watch. What is not told is as before.
  take(told) {
    const core = this.core, before = told.is_snapshot ? new Map() : core.sequences;
    // Iterations before it were not told: nobody knows when these had their token before.
    if (told.is_snapshot) for (const owner of this.owners.all.values()) owner.last = 0;
    if (told.is_snapshot) {
      // A leader's clock is the store's as it began. If that was set back, what is kept has no order with what comes.
      if (told.unix_ms < core.at - SET_BACK_MS) Object.assign(this, {tracks: new Map(), heat: new Heat(), frames: []});
      Object.assign(core, {workers: new Map(), sequences: new Map(), rows: new Map(), queue: [], waiting: 0});
      this.untold++;
    }
    Object.assign(core, {epoch: told.epoch, seq: told.seq, committedSeq: told.committed_seq, at: told.unix_ms});
    if (told.configured) core.configured = told.configured;
    for (const id of told.worker_ids_gone || []) { core.workers.delete(id); core.rows.delete(id); }
    for (const worker of told.workers || []) core.workers.set(worker.worker_id, worker);
    if (told.sequences || told.sequence_ids_gone || told.rows || told.is_snapshot) core.sequences = this.sequences(told);
    if (told.queue) { core.queue = told.queue.sequence_ids; core.waiting = told.queue.length; }
    for (const one of told.passed || []) this.owners.name(one.sequence_id, one.identity);
    for (const ofWorker of told.steps || []) this.steps(ofWorker, before);
    this.keep();
    if (this.owners.all.size > this.ownersMax) this.forget();
  }
  sequences(told) {
    const found = new Map(this.core.sequences);
    for (const id of told.sequence_ids_gone || []) found.delete(id);
    for (const one of told.sequences || []) {
      const before = found.get(one.sequence_id), now = {...before, ...one};
      if (one.identity) {
        this.owners.name(one.sequence_id, one.identity);
        this.isHere(one);
      }
      if (one.tables) now.blocks = one.tables.map((table, group) => blocksOf(before?.blocks?.[group] || [], table));
      found.set(one.sequence_id, now);
    }
    for (const rows of told.rows || []) this.rows(found, rows);
    return found;
  }
  // Its end was nobody's to keep, if this page heard of one: its leader was lost before that was committed.
  isHere({sequence_id, place}) {
    const owner = this.owners.at(this.owners.of(sequence_id));
    owner.ended = false;
    owner.hasBegun ||= place?.preemptions > 0;
  }
  // Who is on a worker, in columns.
  rows(found, {worker_id, sequence_ids, tokens = [], scheduled_tokens, computed_tokens, table_rows = [], skipped, kept, new_blocks, block_ids = []}) {
    if (sequence_ids) this.core.rows.set(worker_id, sequence_ids);
    const ids = this.core.rows.get(worker_id) || [], put = (row, more) => found.set(ids[row], {...found.get(ids[row]), ...more});
    tokens.forEach((count, row) => put(row, {counts: {tokens: count, scheduled_tokens: scheduled_tokens[row], computed_tokens: computed_tokens[row]}}));
    const groups = [...Array(table_rows.length && new_blocks.length / table_rows.length).keys()];
    let table = 0, start = 0;
    for (const row of table_rows) {
      const before = found.get(ids[row])?.blocks || [];
      put(row, {blocks: groups.map((group) => {
        const told = {skipped: skipped[table], kept: kept[table], block_ids: block_ids.slice(start, start += new_blocks[table++])};
        return blocksOf(before[group] || [], told);
      })});
    }
  }
  // `before`: of whoever ran as of the event before.
  steps({worker_id, skipped, steps, is_diff}, before) {
    const worker = this.core.workers.get(worker_id);
    if (skipped) {
      this.lost += skipped;
      this.untold++;
      for (const [id, {place}] of before) if (place?.worker_id === worker_id) this.owners.at(this.owners.of(id)).last = 0;
    }
    if (!steps.length) return;
    let slots = worker?.slots_max || 0;
    for (const step of steps) for (const slot of step.join_slots || []) slots = Math.max(slots, slot + 1);
    const isNew = !this.tracks.has(worker_id), track = this.track(worker_id, slots);
    if (isNew) this.dropTracks(worker_id);
    track.clear();
    if (is_diff) for (const [id, {place}] of before) if (place?.state === "running" && place.worker_id === worker_id) track.join(place.slot, id);
    let isAfterUntold = track.count > 0 && track.untold !== this.untold;
    track.untold = this.untold;
    for (const step of steps) {
      for (const slot of step.leave_slots || []) track.leave(slot);
      (step.join_slots || []).forEach((slot, index) => track.join(slot, step.join_sequence_ids[index]));
      const chunks = new Map((step.chunk_slots || []).map((slot, index) => [slot, step.chunk_tokens[index]]));
      track.push({at: step.answered_unix_ms, stepUs: step.step_us, plan: step.plan_id, step: step.step, tokens: step.tokens,
        // A plan that was made while nobody watched says nothing of this.
        free: step.lease_steps ? step.blocks_free ?? 0 : null, waiting: step.lease_steps ? step.waiting ?? 0 : null, budget: step.budget_tokens || worker?.step_tokens_max || 0, lease: step.lease_steps || 0,
        cached: step.cached_tokens || 0, blocks: ["allocated", "evicted", "shared", "freed", "swapped_out", "swapped_in"].map((name) => step[`blocks_${name}`] || 0),
        expectedUs: step.expected_us || 0, isGraph: !!step.is_graph, whys: step.preempted_whys || [], isAfterUntold}, chunks,
        new Set(step.tokenless_slots), step.finished_slots || [], step.preempted_sequence_ids || [], this.heat);
      isAfterUntold = false;
    }
  }
  // What is seen now, for when somebody looks back.
  keep() {
    const core = this.core, last = this.frames.at(-1), before = this.frames.at(-2);
    const frame = {...core, workers: new Map(core.workers), maps: new Map()};
    for (const worker of core.workers.values()) frame.maps.set(worker.worker_id, this.map(worker, core.sequences));
    if (last && before && last.at - before.at < FRAME_MS && frame.at >= last.at) this.frames.pop();
    this.frames.push(frame);
    let bytes = 0;
    for (const map of frame.maps.values()) bytes += 6 * map.owner.length;
    // A block that many share stands in the table of each.
    for (const {blocks} of core.sequences.values()) for (const table of blocks || []) bytes += 4 * table.length;
    while (this.frames.length > Math.max(2, Math.min(FRAMES_MAX, FRAMES_BYTES_MAX / (bytes || 1)))) this.frames.shift();
  }
  // By block: who holds it, how many do, and whether a prompt may find it.
  map(worker, sequences) {
    const count = worker.block_count, owner = new Uint32Array(count), held = new Uint8Array(count), cached = new Uint8Array(count);
    for (const [id, one] of sequences) {
      if (one.place?.worker_id !== worker.worker_id || !one.blocks) continue;
      const number = this.owners.of(id);
      for (const table of one.blocks) for (const block of table) {
        if (block < 0 || block >= count) continue;
        if (!owner[block]) owner[block] = number;
        if (held[block] < 255) held[block]++;
      }
    }
    const bits = atob(worker.cached_blocks || "");
    for (let block = 0; block < count && block >> 3 < bits.length; block++)
      cached[block] = bits.charCodeAt(block >> 3) >> (block & 7) & 1;
    return {owner, held, cached};
  }
  // A page that is open for days: the oldest go, but for who is still there, and what somebody looks at.
  forget() {
    const seen = new Set();
    if (this.held) {
      for (const {sequences} of this.frames) for (const id of sequences.keys()) seen.add(this.owners.numbers.get(id));
      for (const id of this.held) for (const number of this.tracks.get(id)?.owner || []) seen.add(number);
    }
    this.owners.forget(OWNERS_KEPT, (number, sequenceId) => this.core.sequences.has(sequenceId) || seen.has(number));
    this.ownersMax = this.owners.all.size + OWNERS_MAX - OWNERS_KEPT;
  }
}
const GIVEN_BACK = -1;
function blocksOf(before, {skipped, kept, block_ids}) {
  return [...new Array(skipped).fill(GIVEN_BACK), ...before.slice(skipped, kept), ...block_ids];
}

// Entries of /v1/archive as columns. Blocks and queue are not in them: how many were free, and how many waited.
class ArchiveReader {
  constructor(story) { this.story = story; this.workers = new Map(); this.sequenceIds = []; this.gaps = []; }
  take(entries) {
    this.sequenceIds = [];
    for (const worker of this.workers.values()) worker.slots = worker.counts = [];
    for (const {header, request, record, gap} of entries) {
      if (header) {
        this.sequenceIds = [];
        if (header.epoch !== this.story.core.epoch) for (const id of this.workers.keys()) this.leave(id);
        this.story.core.configured = {policy: header.policy};
        this.story.core.epoch = header.epoch;
      }
      if (request) for (let choice = 0; choice < request.n; choice++)
        this.story.owners.name(request.sequence_id + choice, {...request, choice, tokens_max: request.prompt_tokens + request.max_tokens});
      if (record) this.record(record);
      if (gap) this.gaps.push(gap);
    }
  }
  worker(id, slots = 1) {
    let worker = this.workers.get(id);
    if (!worker) this.workers.set(id, worker = {rows: new Map(), plans: new Map(), fresh: new Set(), slots: [], counts: [], spec: null, slotsMax: slots});
    worker.slotsMax = Math.max(worker.slotsMax, slots);
    return worker;
  }
  // Whoever was there is not any more.
  leave(id) {
    const worker = this.worker(id);
    worker.rows.clear();
    worker.fresh.clear();
    worker.plans.clear();
  }
  record(record) {
    if (record.sequence_ids) this.sequenceIds = record.sequence_ids;
    const last = record.inputs.findLast((input) => input.step);
    for (const input of record.inputs) {
      if (input.worker) this.worker(input.worker.worker_id, input.worker.slots_max).spec = input.worker;
      if (input.worker_lost) this.leave(input.worker_lost);
      if (input.plan) {
        const worker = this.worker(input.plan.worker_id, 1 + Math.max(0, ...input.plan.join_slots));
        worker.plans.set(input.plan.plan_id, input.plan);
        if (worker.plans.size > 8) worker.plans.delete(worker.plans.keys().next().value);
      }
      if (input.step) this.step(input, input === last ? this.sequenceIds : []);
    }
    this.story.core.seq = this.story.core.committedSeq = record.seq;
    this.story.core.at = record.unix_ms;
  }
  step({unix_ms, step}, sequenceIds) {
    const worker = this.worker(step.worker_id);
    if (step.slots) { worker.slots = step.slots; worker.counts = step.token_counts || []; }
    const plan = step.step === 0 ? worker.plans.get(step.plan_id) : null;
    if (plan) {
      for (const slot of plan.leave_slots) { worker.rows.delete(slot); worker.fresh.delete(slot); }
      plan.join_slots.forEach((slot, index) => { worker.rows.set(slot, plan.admitted[index]); worker.fresh.add(slot); });
    }
    // Whoever joined before these entries begin is known by its first token.
    const tokenSlots = worker.slots.flatMap((slot, index) => new Array(worker.counts[index] ?? 1).fill(slot));
    if (tokenSlots.length === sequenceIds.length) tokenSlots.forEach((slot, index) => worker.rows.set(slot, sequenceIds[index]));
    const slots = Math.max(worker.slotsMax, 1 + Math.max(-1, ...worker.rows.keys()));
    const track = this.story.track(step.worker_id, slots);
    track.clear();
    for (const [slot, id] of worker.rows) track.join(slot, id);
    const sampled = new Set(worker.slots), chunks = new Map();
    for (const slot of worker.fresh) {
      if (step.step === 0) chunks.set(slot, 0);
      if (sampled.has(slot)) worker.fresh.delete(slot);
    }
    const tokenless = new Set([...worker.rows.keys()].filter((slot) => !sampled.has(slot)));
    track.push({at: unix_ms, stepUs: step.step_us, plan: step.plan_id, step: step.step, tokens: tokenSlots.length,
      chunkTokens: plan?.chunk_tokens || 0, free: plan?.blocks_free ?? null, waiting: plan?.waiting ?? null, lease: plan?.lease_steps ?? 0,
      budget: worker.spec?.step_tokens_max || 0}, chunks, tokenless, step.finished_slots || [], plan?.preempted || [], this.story.heat);
  }
}
