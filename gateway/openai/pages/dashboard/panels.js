// What is words: workers, queue, who runs, and a request's drawer.

const $ = (id) => document.getElementById(id);
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag), {dataset, ...rest} = properties;
  Object.assign(made, rest);
  if (dataset) Object.assign(made.dataset, dataset);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
// Whoever pressed it by a key stays there: a button that is disabled loses the focus.
const busy = (button, isBusy) => { button.ariaDisabled = String(isBusy); };
const isBusy = (button) => button.ariaDisabled === "true";
// Of watch.proto, WhyPassedOver.
const WHYS = {__proto__: null,
  plans_in_flight: "the worker has not answered the plans it has", nothing_changed: "the worker runs on by itself",
  draining: "the worker is draining", late: "a step of the worker is overdue", no_slot: "every slot is taken",
  no_budget: "another prefill could not be promised its minimum of every step", preempted: "somebody was preempted by this very plan",
  cadence: "the queue is not looked at yet", too_large: "it fits another worker only", suspect: "one suspect at a time",
  verdict: "nobody knows yet whether the workers it lost died of it", another_worker: "another worker can start it now",
  tenant: "its tenant has as much running as it may", long_prefill: "as many long prompts as may be are being computed",
  blocks: "too few blocks are free", margin: "too few blocks would stay free", worst_case: "at its longest it does not fit",
  reserved: "at its longest it does not fit beside those that may not be preempted either", batch: "the batch runs out first",
  end_is_near: "somebody waits, and a slot will be free soon", prefill: "a prefill goes on",
  batch_gap: "with it the gaps of others would be longer than flex requests may make them",
  place_needed: "one that is not flex needs its place", steps_too_long: "with it the gaps of others are longer than flex requests may make them",
  store_behind: "the store has not acknowledged what was decided",
};
const reasonOf = (over) => WHYS[over.why] || over.why.replaceAll("_", " ");
const nameOf = (identity) => identity ? `${identity.id}${identity.choice ? `/${identity.choice}` : ""}` : "?";
// Of a socket its name, as `kaiten top` has it.
const workerName = ({address, worker_id}) => address?.startsWith("unix:") ? address.split("/").pop().replace(/\.[^.]*$/, "") : address || worker_id;
const partsOf = (identity) => { const [, tenant, id] = identity.id.match(/^([^:]*):(.*)$/s) || [null, "", identity.id]; return {tenant, id}; };

// As kaiten/cli/live/reasons.py says it.
const closing = (worker) => [worker.is_draining && WHYS.draining, worker.is_late && WHYS.late,
  ...worker.passed_over.filter((each) => ["plan", "place"].includes(each.stage)).map(reasonOf)].filter(Boolean);
// Why nobody can join any worker; empty: somebody can, as far as it is known.
function closed(frame) {
  if (!frame.workers.size) return "no worker is here";
  const whys = [...frame.workers.values()].map(closing);
  return whys.every((each) => each.length) ? [...new Set(whys.flat())].join(", ") : "";
}
function whyWaits(frame, id) {
  const sequence = frame.sequences.get(id), over = sequence?.passed_over || [], {workers} = frame;
  if (over.length) return over.map((each) => `${workers.size > 1 && each.worker_id ? `${workerName(workers.get(each.worker_id) || each)}: ` : ""}${reasonOf(each)}`).join("; ");
  if (sequence?.place?.state === "forking") return "forks from its first choice";
  return closed(frame) || (frame.queue[0] === id ? "its turn has not come" : "behind those before it");
}
function requestCell(story, id, sequence) {
  const owner = story.owners.at(story.owners.of(id)), swatch = element("span", {className: "swatch"});
  swatch.style.background = hue(owner, false);
  const button = element("button", {title: nameOf(sequence?.identity), dataset: {sequence: id}}, shortName(owner.id ? owner : {...owner, sequenceId: id}));
  return element("td", {}, swatch, button);
}
const cell = (text, isNumber) => element("td", {className: isNumber ? "num" : "", textContent: text});
// Rows are made anew when they would read otherwise, and keep who has the focus.
function fill(body, rows, digest) {
  // A click begins and ends at the same row, which rows above it move.
  if (body.dataset.digest === digest || $("right").matches(":active")) return;
  const focused = body.contains(document.activeElement) ? document.activeElement.dataset.sequence : null;
  body.dataset.digest = digest;
  body.replaceChildren(...rows());
  if (focused) body.querySelector(`[data-sequence="${CSS.escape(focused)}"]`)?.focus();
}

const ROWS_SHOWN = 100;
const said = (text) => element("tr", {}, element("td", {colSpan: 4, className: "dim", textContent: text}));
const more = (count) => count > 0 ? [said(`and ${count} more`)] : [];
function showQueue(story, frame, isArchive, waiting) {
  const length = isArchive ? waiting : frame?.waiting ?? 0;
  $("queue-note").textContent = length === null || length === undefined ? "" : length ? `${length} wait` : "nobody waits";
  const shown = isArchive ? [] : (frame?.queue || []).slice(0, ROWS_SHOWN);
  const told = shown.map((id) => {
    const sequence = frame.sequences.get(id), wait = sequence?.identity ? frame.at - sequence.identity.arrived_unix_ms : 0;
    return {id, sequence, tokens: `${sequence?.identity?.prompt_tokens ?? "?"}`, wait: milliseconds(Math.max(0, wait)),
      why: (sequence?.place?.state === "preempted" ? "preempted; " : "") + whyWaits(frame, id)};
  });
  fill($("queue"), () => told.length ? told.map((row) => element("tr", {}, requestCell(story, row.id, row.sequence), cell(row.tokens, true), cell(row.wait, true), cell(row.why))).concat(more(length - told.length))
    : [said(isArchive ? "the archive says how many waited, not who" : "nobody waits")],
    JSON.stringify([isArchive, length, told.map((row) => [row.id, row.wait, row.why])]));
}
function showRunning(story, frame, workerId, isArchive) {
  const running = isArchive ? [] : [...(frame?.sequences.values() || [])].filter((one) => one.place?.state === "running" && one.place.worker_id === workerId)
    .sort((one, other) => one.place.slot - other.place.slot);
  $("running-note").textContent = isArchive ? "" : `${running.length} sequence${running.length === 1 ? "" : "s"}`;
  const shown = running.slice(0, ROWS_SHOWN).map((one) => [one, one.counts?.computed_tokens ?? 0, one.counts?.tokens ?? 0, one.identity?.tokens_max ?? 0,
    (one.blocks || []).reduce((sum, table) => sum + table.filter((block) => block >= 0).length, 0)]);
  fill($("running"), () => shown.map(([one, , tokens, most, blocks]) => element("tr", {}, requestCell(story, one.sequence_id, one), cell(one.place.slot, true),
    cell(`${tokens} of ${most}`, true), cell(blocks, true))).concat(more(running.length - shown.length)),
    JSON.stringify([running.length, ...shown.map(([one, ...rest]) => [one.sequence_id, one.place.slot, ...rest])]));
}
function meter(name, part, whole) {
  const inner = element("i"), bar = element("i", {}, inner);
  inner.style.width = `${Math.min(100, 100 * part / whole) || 0}%`;
  return element("div", {className: "meter"}, element("span", {textContent: name}), bar, element("span", {textContent: `${part} of ${whole}`}));
}
// Of archives, what its newest iteration by then says of it.
function load(track, at) { const column = track?.column(track.indexAt(at)); return column ? [column.busy, column.free ?? "?"] : [0, "?"]; }
function showWorkers(story, frame, chosen, choose, at) {
  const workers = [...(frame?.workers.values() || [])];
  const rates = workers.map((worker) => rate(story.tracks.get(worker.worker_id), at));
  const running = (id) => [...frame.sequences.values()].filter((one) => one.place?.state === "running" && one.place.worker_id === id).length;
  const taken = (worker) => story.name === "archive" ? load(story.tracks.get(worker.worker_id), at) : [running(worker.worker_id), worker.blocks_free];
  const told = workers.map((worker, index) => [worker.worker_id, workerName(worker), ...taken(worker), worker.slots_max, worker.block_count,
    worker.is_draining, worker.is_late, worker.worker_id === chosen, rates[index], worker.plans, worker.passed_over, worker.host_block_count, worker.host_blocks_used]);
  fill($("workers"), () => told.length ? told.map(([id, name, busy, free, slots, blocks, isDraining, isLate, isChosen, speed, plans, over, hostBlocks, hostUsed]) =>
    element("button", {className: "card", ariaPressed: String(isChosen), onclick: () => choose(id), dataset: {sequence: id}}, element("b", {textContent: name}),
      element("span", {className: "dim", textContent: `  ${speed}`}), ...[isDraining && "draining", isLate && "late"].filter(Boolean).map((word) => element("span", {className: "bad", textContent: `  ${word}`})),
      meter("slots", busy, slots), meter("blocks", free === "?" ? free : blocks - free, blocks), hostBlocks && meter("host", hostUsed, hostBlocks),
      plans && element("div", {className: "dim", textContent: `${plans.length} plan${plans.length === 1 ? "" : "s"} in flight${plans.length ? `: ${plans.map((plan) => `${plan.steps_answered} of ${plan.lease_steps} steps`).join(", ")}` : ""}`}),
      ...over.map((each) => element("div", {className: "dim", textContent: `${each.stage === "lease" ? "short plans" : "nobody joins"}: ${reasonOf(each)}`}))))
    : [element("p", {className: "dim", textContent: "no worker"})], JSON.stringify(told));
}
// Over the second before a moment.
function rate(track, now) {
  let steps = 0, tokens = 0, index = track ? track.indexAt(now) : -1;
  for (; index >= (track?.oldest ?? 0); index--) {
    const column = track.column(index);
    if (column.at < now - 1000) break;
    steps++;
    tokens += column.tokens;
  }
  return `${steps} steps/s, ${tokens} tokens/s`;
}
function showLeader(story, frame) {
  if (!frame?.epoch) return void ($("leader").textContent = "dashboard");
  const {policy, placement, order, victim, admission, mix, cadence} = frame.configured, rules = [placement, order, victim, admission, mix, cadence].filter(Boolean);
  const behind = frame.seq - (frame.committedSeq ?? frame.seq);
  $("leader").textContent = `leader ${frame.epoch} · ${policy || "?"}${rules.length ? ` (${rules.join(", ")})` : ""} · record ${frame.seq}${behind > 0 ? `, ${behind} uncommitted` : ""}`;
}

// One request, and where its time went.
const PHASES = {queue: "waits", prefill: "prefill", decode: "decode", unknown: "unknown", stall: "stalled", accept: "accepted", commit: "committed", deliver: "delivered", reader: "its reader"};
class Drawer {
  constructor(story, frame) { Object.assign(this, {story, frame, id: null, turn: 0, timer: null, opener: null}); }
  open(sequenceId, opener) {
    this.close(false);
    Object.assign(this, {id: sequenceId, opener, turn: this.turn + 1});
    $("drawer").hidden = false;
    this.title = element("h2", {id: "drawer-title", tabIndex: -1});
    this.facts = element("dl");
    this.fall = element("div", {className: "dim", textContent: "asking where its time went"});
    $("drawer").replaceChildren(element("div", {className: "head"}, this.title, element("button", {textContent: "Close", onclick: () => this.close(true)})), this.facts, element("h3", {className: "sr", textContent: "Explain"}), this.fall);
    this.update();
    this.title.focus();
    this.explain();
  }
  close(isByHand) {
    if (this.id === null) return;
    clearTimeout(this.timer);
    // The row that opened it may have been made anew since.
    const opener = this.opener?.isConnected ? this.opener : this.opener && $("right").querySelector(`[data-sequence="${this.id}"]`);
    this.id = null;
    $("drawer").hidden = true;
    if (isByHand) (opener || $("ribbon")).focus();
  }
  update() {
    if (this.id === null) return;
    const story = this.story(), frame = this.frame(), owner = story.owners.at(story.owners.of(this.id)), one = frame?.sequences.get(this.id);
    const identity = one?.identity || (owner.id && {id: owner.id, choice: owner.choice, prompt_tokens: owner.promptTokens, tokens_max: owner.tokensMax, arrived_unix_ms: owner.arrived});
    const swatch = element("span", {className: "swatch"});
    swatch.style.background = hue(owner, false);
    this.title.replaceChildren(swatch, identity ? nameOf(identity) : `sequence ${this.id}`);
    const place = one?.place, counts = one?.counts, blocks = (one?.blocks || []).flat().filter((block) => block >= 0);
    const facts = [["sequence", this.id], ["state", place ? `${place.state}${place.state === "running" ? `, slot ${place.slot} of ${workerName(frame.workers.get(place.worker_id) || place)}` : ""}` : owner.ended ? "ended" : "not in the core"],
      ["prompt", identity ? `${identity.prompt_tokens} tokens` : "?"], ["tokens", counts ? `${counts.tokens} known, ${counts.computed_tokens} computed${identity ? `, ${identity.tokens_max} at most` : ""}` : "–"],
      ["preemptions", place?.preemptions ?? "–"], ["priority", one?.identity?.priority ?? "–"], ["blocks", blocks.length ? `${blocks.length}: ${runsOf(blocks)}` : "none"],
      ["first token", owner.first && owner.arrived ? `after ${milliseconds(owner.first - owner.arrived)}` : "–"]];
    if (frame?.queue.includes(this.id)) facts.splice(2, 0, ["waits", `place ${frame.queue.indexOf(this.id) + 1}: ${whyWaits(frame, this.id)}`]);
    const digest = JSON.stringify(facts);
    if (this.facts.dataset.digest === digest) return;
    this.facts.dataset.digest = digest;
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {textContent: name}), element("dd", {textContent: value})]));
  }
  async explain() {
    const {id, turn} = this, story = this.story(), owner = story.owners.at(story.owners.of(id)), isOver = () => this.id === null || this.turn !== turn;
    const again = (ms) => { this.timer = setTimeout(() => this.explain(), ms); };
    if (story.name === "file") return void this.fall.replaceChildren("a file has no explanation of single requests");
    if (!owner.id) return void this.fall.replaceChildren("it is not known whose request this was");
    await inSight();
    if (isOver()) return;
    try {
      const {tenant, id: request} = partsOf(owner);
      const told = await (await ask(`v1/requests/${encodeURIComponent(request)}/explain?tenant=${encodeURIComponent(tenant)}`)).json();
      if (isOver()) return;
      const choice = told.choices.find((each) => each.index === owner.choice) || told.choices[0];
      this.tell(choice);
      // Not by what this page knows: it ended while this was told, or is not committed yet.
      if (!choice.ended) again(1000);
    } catch (error) {
      if (isOver()) return;
      this.fall.replaceChildren(error.message);
      // Nobody leads just now, say: but for what was refused.
      if (!(error.status < 429)) again(2000);
    }
  }
  tell(choice) {
    const rows = choice.intervals.map((interval) => {
      const more = [interval.why, interval.chunk_tokens.length && `${interval.chunk_tokens.reduce((a, b) => a + b)} tokens in ${interval.chunk_tokens.length} chunk${interval.chunk_tokens.length > 1 ? "s" : ""}`,
        interval.cached_tokens && `${interval.cached_tokens} from the cache`, interval.swapped_in_blocks && `${interval.swapped_in_blocks} blocks from host memory`, interval.phase === "decode" && `${interval.steps} steps, ${milliseconds(interval.gap_p50_ms)} apart${interval.longest_gaps[0] ? `, ${milliseconds(interval.longest_gaps[0].gap_ms)} at most` : ""}`,
        interval.stalled_by_sequence_id && `that of ${interval.stalled_by_id || `sequence ${interval.stalled_by_sequence_id}`}`,
        interval.behind_sequence_id && `of ${interval.behind_id || `sequence ${interval.behind_sequence_id}`}, which is before it`, interval.batch_mates && `beside ${interval.batch_mates}`].filter(Boolean).join("; ");
      return element("tr", {}, cell(milliseconds(interval.start_ms), true), cell(milliseconds(interval.ms), true), element("td", {}, element("span", {className: `swatch p-${interval.phase}`}), PHASES[interval.phase] || interval.phase), cell(more));
    });
    const track = element("div", {className: "track"}, ...choice.intervals.map((interval) => {
      const bar = element("span", {className: `p-${interval.phase}`, title: `${PHASES[interval.phase] || interval.phase} ${milliseconds(interval.ms)}`});
      bar.style.left = `${100 * interval.start_ms / (choice.ms || 1)}%`;
      bar.style.width = `${100 * interval.ms / (choice.ms || 1)}%`;
      return bar;
    }));
    const heads = ["at", "for", "phase", "why"].map((name, index) => element("th", {scope: "col", className: index < 2 ? "num" : "", textContent: name}));
    const shown = element("div", {}, element("p", {className: "big", textContent: `${milliseconds(choice.ms)}${choice.ended ? `, ended: ${choice.ended}` : " so far"}`}), element("div", {className: "fall"}, track),
      element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
    this.fall.replaceChildren(shown);
    this.fall.className = "";
  }
}
function runsOf(blocks) {
  const parts = [];
  for (const block of blocks) {
    const last = parts.at(-1);
    if (last && last[1] === block - 1) last[1] = block;
    else parts.push([block, block]);
  }
  return parts.slice(0, 12).map(([first, last]) => first === last ? first : `${first}–${last}`).join(" ") + (parts.length > 12 ? " …" : "");
}
