// A ragged burst through the running policy, and what `static` would have made of the same lengths.

const BURST_MAX = 96, BURST_MEAN = 80, BURST_TOKENS_MAX = 400, BURST_SILENT_S_MAX = 60;
// Exponential, by a generator that always says the same.
function raggedLengths(count) {
  let state = 20261125;
  return Array.from({length: count}, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.min(BURST_TOKENS_MAX, 2 + Math.floor(-BURST_MEAN * Math.log(1 - state / 2 ** 32)));
  });
}

// In the background: a browser has six connections, and this page watches by one of them.
async function sendBurst(lengths) {
  const send = async (length, index) => {
    const body = {input: `${index + 1} plates of salmon`, max_output_tokens: length, ignore_eos: true, temperature: 0, background: true};
    const reply = await (await ask("v1/responses", {method: "POST", body: JSON.stringify(body)})).json();
    return reply.id.replace(/^resp_/, "");
  };
  return Promise.all(lengths.map(send));
}

// Those of the story that have these ids, when all have ended. Error: not every iteration since was told.
async function ended(story, ids, untold, tell) {
  const wanted = new Set(ids);
  for (let before = -1, silentSince = performance.now(); ; ) {
    if (document.hidden) {
      await inSight();
      silentSince = performance.now();
    }
    if (story.untold !== untold) throw new Error("not every iteration of the burst was told: this page was out of sight or away, or is too slow");
    const owners = [...story.owners.all.values()].filter((owner) => wanted.has(partsOf(owner).id)), done = owners.filter((owner) => owner.ended).length;
    if (done === wanted.size) return owners;
    if (done !== before) { before = done; silentSince = performance.now(); tell(`${done} of ${wanted.size} have ended`); }
    if (performance.now() - silentSince > 1000 * BURST_SILENT_S_MAX) throw new Error(`${wanted.size - done} requests of the burst are not answered`);
    await new Promise((wake) => setTimeout(wake, 100));
  }
}

// Of one worker, from the first iteration of one of these to the last; who else was there, too.
function cutOut(track, owners) {
  const numbers = new Set(owners.map((owner) => owner.number)), seen = new Set();
  let first = -1, last = -1;
  for (let index = track.oldest; index < track.count; index++)
    for (let slot = 0; slot < track.slots; slot++) {
      const {owner, kind} = track.cell(index, slot);
      if (!numbers.has(owner)) continue;
      if (first < 0) first = index;
      last = index;
      if ([DECODE, FIRST].includes(kind & KIND)) seen.add(owner);
    }
  const cut = track.part(Math.max(0, first), last + 1);
  return {cut, there: owners.filter((owner) => seen.has(owner.number)).sort((one, other) => one.arrived - other.arrived)};
}

// Between two iterations, beyond what the worker computed: plans and tokens on their way.
function between(track) {
  const gaps = [];
  for (let index = 1; index < track.count; index++) {
    const column = track.column(index);
    gaps.push(Math.max(0, column.at - track.column(index - 1).at - column.stepUs / 1000));
  }
  return Math.min(1000, gaps.reduce((sum, gap) => sum + gap, 0) / (gaps.length || 1));
}

// The answer of /v1/rehearsals as a track; each has the colour of the request that it stands for.
function played(steps, worker, owners) {
  const story = new Story("played");
  story.core.workers.set(steps.worker_id, {...worker, worker_id: steps.worker_id});
  owners.forEach((owner, index) => { Object.assign(story.owners.at(story.owners.of(index + 1)), {id: owner.id, choice: owner.choice, hue: owner.hue}); });
  story.steps(steps);
  return story.tracks.get(steps.worker_id);
}
function figures(track, since) {
  const tokens = track.columns.slice(0, track.count).reduce((sum, column) => sum + column.tokens, 0);
  return `${track.count} iterations, ${(tokens / track.count).toFixed(1)} tokens each, ${milliseconds(track.column(track.count - 1).at - since)}`;
}

class Comparison {
  constructor() { this.pair = null; }
  note(text) { $("compare-note").textContent = text; }
  async run() {
    if (isBusy($("burst"))) return;
    busy($("burst"), true);
    this.pair = null;
    $("compare").hidden = false;
    $("compare-pair").hidden = true;
    try { await this.play(); } catch (error) { this.note(error.message); }
    busy($("burst"), false);
  }
  async play() {
    const slots = [...live.core.workers.values()].reduce((sum, worker) => sum + worker.slots_max, 0), worker = live.core.workers.get(live.follow(view.wanted, view.workerId));
    if (!worker) throw new Error("no worker");
    this.note("the burst is on its way");
    const {untold} = live;
    const sent = raggedLengths(Math.min(BURST_MAX, 4 * slots)), ids = await sendBurst(sent), lengthOf = new Map(ids.map((id, index) => [id, sent[index]]));
    const owners = await ended(live, ids, untold, (text) => this.note(text));
    const track = live.tracks.get(worker.worker_id), {cut, there} = track ? cutOut(track, owners) : {there: []};
    if (!there.length) throw new Error(`none of the burst ran on ${workerName(worker)}`);
    const began = there[0].arrived, requests = there.map((owner) => ({arrived_ms: owner.arrived - began, prompt_tokens: owner.promptTokens, output_tokens: lengthOf.get(partsOf(owner).id)}));
    const asked = {worker_id: worker.worker_id, between_ms: between(cut), requests};
    const rehearse = async (policy) => (await ask("v1/rehearsals", {method: "POST", body: JSON.stringify({...asked, policy})})).json();
    const again = await rehearse(""), other = await rehearse("static");
    const same = played(again.steps, worker, there), still = played(other.steps, worker, there), lengths = requests.map((request) => request.output_tokens);
    const times = (of) => (of(still) / of(same)).toFixed(2), end = (track) => track.column(track.count - 1).at;
    this.note(`${there.length} requests with outputs of ${Math.min(...lengths)} to ${Math.max(...lengths)} tokens. Both played, static takes ${times((track) => track.count)} times the iterations and ${times(end)} times the time of ${again.configured.policy || "the running policy"}.`);
    $("compare-continuous").textContent = `Continuous, as it was (${again.configured.policy || "?"}): ${figures(cut, began)}`;
    $("compare-static").textContent = `Static, played and not run: ${figures(still, 0)}`;
    $("compare-how").textContent = `Played: the scheduler's own core decides for these lengths and arrivals, with steps and pauses as long as those measured on ${workerName(worker)}. How good that is: the running policy, played the same way, has ${figures(same, 0)}.`;
    $("compare-pair").hidden = false;
    this.pair = [cut, still];
    this.draw();
  }
  draw() {
    if (!this.pair || $("compare").hidden) return;
    const most = Math.max(...this.pair.map((track) => track.count));
    [$("continuous"), $("static")].forEach((canvas, index) => {
      const drawn = new Ribbon(canvas, false);
      drawn.columnWidth = (canvas.clientWidth - GUTTER) / most;
      drawn.draw(this.pair[index], most);
    });
  }
  close() { $("compare").hidden = true; $("burst").focus(); }
}
