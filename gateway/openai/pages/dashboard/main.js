// One view of one story: live, paused, out of the archive, or of a file.

const live = new Story("live"), ARCHIVE_STEP_MS = 10000;
const view = {story: live, isPaused: false, workerId: null, wanted: null, head: 0, shown: 0, chosen: 0, frames: 0, began: performance.now(), held: null};
const ribbon = new Ribbon($("ribbon")), blockMap = new BlockMap($("blocks")), heats = [new HeatMap($("ttft"), "ttft"), new HeatMap($("gap"), "gap")];
let isDirty = true, panelsAt = 0, tablesAt = 0, state = ["away", "connecting"];

const track = () => view.story.tracks.get(view.workerId);
// What was beside the batch when it was paused stays there until another moment is asked for.
const frameNow = () => {
  if (view.isPaused && view.held && view.held.head === view.head) return view.held.frame;
  const column = view.isPaused ? track()?.column(Math.ceil(view.head) - 1) : null;
  return column ? view.story.frame(column.at) : view.story.frames.at(-1) || null;
};
const drawer = new Drawer(() => view.story, frameNow);
const changed = () => { isDirty = true; };

function chooseWorker(id) {
  const at = view.isPaused && track()?.column(Math.ceil(view.head) - 1)?.at;
  view.workerId = id;
  view.held = ribbon.cursor = null;
  view.head = view.shown = at && track() ? Math.min(track().count, Math.max(track().oldest, track().indexAt(at)) + 1) : track()?.count || 0;
  changed();
}
// Another one: nothing of the one before is beside it.
function show(story) {
  drawer.close(false);
  for (const body of ["queue", "running"]) $(body).dataset.digest = "";
  Object.assign(view, {story, isPaused: story !== live, held: null});
  ribbon.cursor = null;
  live.hold(false);
  $("pause").textContent = view.isPaused ? "Go on" : "Pause";
  $("problem").textContent = "";
}
function wantWorker(id) { view.wanted = {id, address: frameNow()?.workers.get(id)?.address || ""}; chooseWorker(id); }
function followLive() {
  const id = view.isPaused && view.workerId ? view.workerId : live.follow(view.wanted, view.workerId);
  if (id !== view.workerId) chooseWorker(id);
  if (!view.isPaused) view.head = track()?.count || 0;
  // Whoever asked for no worker goes on with what comes after this one.
  view.wanted ||= live.core.workers.has(id) ? {id, address: live.core.workers.get(id).address} : null;
  changed();
}
function pause(isPaused) {
  if (!isPaused && view.story !== live) { show(live); view.workerId = null; }
  view.isPaused = isPaused;
  live.hold(isPaused);
  if (isPaused) view.shown = view.head = Math.min(track()?.count || 0, Math.round(view.shown) || view.head);
  else ribbon.cursor = null;
  view.held = isPaused ? {head: view.head, frame: live.frames.at(-1) || null} : null;
  $("pause").textContent = isPaused ? "Go on" : "Pause";
  followLive();
  tellState();
}
function tellState() {
  const name = view.story === live ? state[0] === "live" ? view.isPaused ? "paused" : "live" : state[1] : view.story.name === "file" ? "a file" : "from the archive";
  $("state").textContent = name;
  $("state").className = view.isPaused && (view.story !== live || state[0] === "live") ? "paused" : state[0];
}
function scrub(index) {
  const of = track();
  if (!of) return;
  if (!view.isPaused) pause(true);
  view.head = view.shown = Math.max(of.oldest + 1, Math.min(of.count, index));
  changed();
}

async function older() {
  if (isBusy($("older"))) return;
  const of = track(), first = of?.column(of.oldest), until = first ? first.at : live.core.at || Date.now();
  const last = view.story.until ?? until;
  busy($("older"), true);
  try {
    const pages = await archived(until - ARCHIVE_STEP_MS, last);
    const story = new Story("archive"), reader = new ArchiveReader(story);
    for (const page of pages.entries) reader.take(page);
    if (![...story.tracks.values()].some((each) => each.count)) throw new Error("the archive has no iteration of the ten seconds before");
    story.until = last;
    const workers = new Map([...reader.workers].map(([id, worker]) => [id, {worker_id: id, address: live.core.workers.get(id)?.address || id, slots_max: worker.slotsMax, block_count: worker.spec?.block_count || live.core.workers.get(id)?.block_count || 0,
      plans: null, passed_over: [], is_draining: false, is_late: false}]));
    story.frames = [{...story.core, at: 0, workers, maps: new Map()}];
    show(story);
    view.workerId = story.tracks.has(view.workerId) ? view.workerId : story.tracks.keys().next().value;
    view.head = view.shown = track().count;
    $("problem").textContent = pages.isCut ? "the archive has more of this stretch than is shown" : reader.gaps.length ? `the archive has a gap: ${reader.gaps[0].reason}` : "";
  } catch (error) { $("problem").textContent = error.message; }
  busy($("older"), false);
  tellState();
  changed();
}

function words(hit) {
  const of = track(), column = of.column(hit.index), took = `${milliseconds(column.stepUs / 1000)}${column.expectedUs ? ` (${milliseconds(column.expectedUs / 1000)} expected)` : ""}${column.isGraph ? ", one graph" : ""}`;
  const lines = [`iteration ${column.plan}.${column.step}${column.lease > 1 ? ` of ${column.lease} steps` : ""}, ${clock(column.at)}: ${took}, ${column.decodes} decode${column.chunked ? `, ${column.chunked} prompt tokens` : ""}`];
  if (hit.slot !== null) {
    const {owner, kind, chunk} = of.cell(hit.index, hit.slot), one = view.story.owners.at(owner);
    lines.push(`slot ${hit.slot}: ${owner ? `${one.id ? nameOf(one) : `sequence ${one.sequenceId}`}, ${["idle", "decode", "prefill", "prefill and first token", "sits out"][kind & KIND]}${chunk ? ` of ${chunk} tokens` : ""}${kind & FINISHED ? ", ended" : ""}${kind & PREEMPTED ? ", preempted" : ""}` : "idle"}`);
  }
  if (column.free !== null && column.free !== undefined) lines.push(`${column.free} blocks free, ${column.waiting} waiting`);
  const [taken, evicted, shared, freed, out, back] = column.blocks || [0, 0, 0, 0, 0, 0];
  if (taken || shared || freed) lines.push(`blocks: ${taken} taken${evicted ? ` (${evicted} evicted)` : ""}, ${shared} from the cache${column.cached ? ` (${column.cached} tokens)` : ""}, ${freed} given back${out || back ? `, ${out} to the host's memory, ${back} from there` : ""}`);
  if (column.isAfterUntold) lines.push("those before it may not all have been told");
  for (const why of new Set(column.whys)) lines.push(`preempted: ${reasonOf({why})}`);
  return lines.join("\n");
}
const clock = (ms) => new Date(ms).toISOString().slice(11);
function tip(text, x, y) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  if (box.textContent !== text) box.textContent = text;
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${y + 18 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 10 : y + 18}px`;
}

function draw(now) {
  requestAnimationFrame(draw);
  const of = track();
  // What is paused for long goes with the newest that is kept of then.
  if (of?.count && view.isPaused && view.head <= of.oldest) { view.head = of.oldest + 1; isDirty = true; }
  const target = view.head, far = target - view.shown;
  if (of && far) {
    // Iterations come several at once; they pass one after the other.
    view.shown = matchMedia("(prefers-reduced-motion: reduce)").matches || Math.abs(far) > 400 || Math.abs(far) < .02 ? target : view.shown + far * Math.min(1, (now - view.drawnAt) / 220);
    isDirty = true;
  }
  view.drawnAt = now;
  if (!isDirty) return;
  isDirty = false;
  view.frames++;
  ribbon.draw(of, view.shown);
  if (now - panelsAt < 100) { isDirty = true; return; }
  panelsAt = now;
  panels(of, now);
}
function panels(of, now) {
  const story = view.story, frame = frameNow(), isArchive = story.name === "archive", column = of?.column(Math.ceil(view.head) - 1), at = (view.isPaused ? column?.at : frame?.at) ?? column?.at ?? frame?.at ?? 0;
  const range = $("scrub");
  range.min = of?.oldest ?? 0;
  range.max = of?.count ?? 0;
  if (document.activeElement !== range || !view.isPaused) range.value = Math.ceil(view.head);
  range.setAttribute("aria-valuetext", column ? `iteration ${column.plan}.${column.step}` : "none");
  $("when").textContent = column ? `${clock(column.at)}  ${view.isPaused && story === live ? `−${milliseconds(live.core.at - column.at)}` : `plan ${column.plan}`}` : "no iteration yet";
  const worker = frame?.workers.get(view.workerId), map = isArchive ? null : frame?.maps.get(view.workerId);
  $("batch-note").textContent = worker ? `${workerName(worker)}, ${worker.slots_max} slots × iterations${story.lost ? `; ${story.lost} steps were not told` : ""}` : "";
  if (map) {
    const {each} = blockMap.shape(map.owner.length);
    let held = 0, shared = 0, evictable = 0;
    for (let block = 0; block < map.owner.length; block++) {
      if (map.owner[block]) { held++; if (map.held[block] > 1) shared++; } else if (map.cached[block]) evictable++;
    }
    $("blocks-note").textContent = `${map.owner.length} of ${worker.block_size} tokens: ${held} held, ${shared} shared, ${evictable} evictable, ${map.owner.length - held - evictable} free${each > 1 ? `; a cell is ${each} of them` : ""}${worker.host_block_count ? `; ${worker.host_blocks_used} of ${worker.host_block_count} in the host's memory hold what had to go` : ""}`;
  } else $("blocks-note").textContent = isArchive && column ? `${column.free ?? "?"} of ${worker?.block_count || "?"} free; whose the others were, the archive does not say` : "";
  blockMap.draw(map, story.owners, drawer.id === null ? 0 : story.owners.of(drawer.id));
  for (const heat of heats) heat.draw(story.heat, at);
  for (const kind of ["ttft", "gap"]) {
    const [half, most] = [.5, .95].map((share) => story.heat.quantile(kind, share, 30, at));
    $(`${kind}-note`).textContent = half === null ? "" : `half below ${milliseconds(half)}, 95 % below ${milliseconds(most)}`;
  }
  drawer.update();
  // Words are read, not watched, and a hundred rows are dear.
  if (now - tablesAt < 400) { isDirty = true; return; }
  tablesAt = now;
  showLeader(story, frame);
  showWorkers(story, frame, view.workerId, wantWorker, at);
  showQueue(story, frame, isArchive, column?.waiting);
  showRunning(story, frame, view.workerId, isArchive);
}

$("pause").addEventListener("click", () => pause(!view.isPaused));
$("older").addEventListener("click", older);
$("scrub").addEventListener("input", (event) => scrub(Number(event.target.value)));
$("zoom").addEventListener("change", (event) => { ribbon.columnWidth = Number(event.target.value); changed(); });
$("save").addEventListener("click", () => download("kaiten-dashboard.json", saved(view.story, frameNow())));
$("trace").addEventListener("click", () => download("kaiten-trace.json", chromeTrace(view.story)));
const comparison = new Comparison();
$("burst").addEventListener("click", () => comparison.run());
$("compare-close").addEventListener("click", () => comparison.close());
$("load").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    if (file.size > FILE_BYTES_MAX) throw new Error(`a file has at most ${FILE_BYTES_MAX / 1e6} MB`);
    const story = loaded(JSON.parse(await file.text()));
    show(story);
    view.workerId = story.tracks.keys().next().value ?? null;
    view.head = view.shown = track()?.count || 0;
  } catch (error) { $("problem").textContent = `${file.name}: ${error.message}`; }
  tellState();
  changed();
});

// 0 is nobody's number.
function openOwner(number, opener) {
  const owner = view.story.owners.all.get(number);
  if (owner) drawer.open(owner.sequenceId, opener);
}
$("ribbon").addEventListener("pointermove", (event) => {
  const of = track(), hit = of && ribbon.at(of, event.offsetX, event.offsetY);
  if (hit) { ribbon.cursor = hit; tip(words(hit), event.clientX, event.clientY); } else tip("");
  changed();
});
$("ribbon").addEventListener("pointerleave", () => { if (!view.isPaused) ribbon.cursor = null; tip(""); changed(); });
$("ribbon").addEventListener("click", (event) => {
  const of = track(), hit = of && ribbon.at(of, event.offsetX, event.offsetY);
  if (!hit || hit.slot === null) return;
  const {owner} = of.cell(hit.index, hit.slot);
  openOwner(owner, $("ribbon"));
});
const MOVES = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-20, 0], PageDown: [20, 0]};
$("ribbon").addEventListener("keydown", (event) => {
  const of = track(), move = MOVES[event.key];
  if (!of?.count || !(move || event.key === "Enter")) return;
  event.preventDefault();
  if (!view.isPaused) pause(true);
  if (!ribbon.cursor || !of.column(ribbon.cursor.index)) ribbon.cursor = {index: Math.ceil(view.head) - 1, slot: 0};
  else if (move) {
    const {index, slot} = ribbon.cursor;
    ribbon.cursor = {index: Math.max(of.oldest, Math.min(of.count - 1, index + move[0])), slot: Math.max(0, Math.min(of.slots - 1, (slot ?? 0) + move[1]))};
  }
  // Below the slots there is nobody.
  if (event.key === "Enter" && ribbon.cursor.slot !== null) {
    const {owner} = of.cell(ribbon.cursor.index, ribbon.cursor.slot);
    openOwner(owner, $("ribbon"));
  }
  // What is pointed at stays in sight.
  if (ribbon.cursor.index >= view.head) scrub(ribbon.cursor.index + 1);
  if (ribbon.cursor.index < view.head - ribbon.columns + 1) scrub(ribbon.cursor.index + ribbon.columns - 1);
  $("spoken").textContent = words(ribbon.cursor);
  const box = $("ribbon").getBoundingClientRect(), x = box.right - (view.shown - ribbon.cursor.index) * ribbon.columnWidth;
  tip(words(ribbon.cursor), x, box.top + (ribbon.cursor.slot + 1) * ribbon.rowHeight(of));
  changed();
});
$("ribbon").addEventListener("blur", () => tip(""));
$("blocks").addEventListener("pointermove", (event) => {
  const frame = frameNow(), map = frame?.maps.get(view.workerId), block = map && blockMap.at(map.owner.length, event.offsetX, event.offsetY);
  blockMap.cursor = block ?? null;
  if (block === null || block === undefined) return tip("");
  const one = map.owner[block] ? view.story.owners.at(map.owner[block]) : null;
  tip(`block ${block}: ${one ? `${one.id ? nameOf(one) : `sequence ${one.sequenceId}`}${map.held[block] > 1 ? `, shared by ${map.held[block]}` : ""}${map.cached[block] ? ", cached" : ""}` : map.cached[block] ? "cached, held by nobody: evictable" : "free"}`, event.clientX, event.clientY);
  changed();
});
$("blocks").addEventListener("pointerleave", () => { blockMap.cursor = null; tip(""); changed(); });
$("blocks").addEventListener("click", (event) => {
  const map = frameNow()?.maps.get(view.workerId), block = map && blockMap.at(map.owner.length, event.offsetX, event.offsetY);
  if (block !== null && map) openOwner(map.owner[block], null);
});
for (const body of [$("queue"), $("running")]) body.addEventListener("click", (event) => {
  const button = event.target.closest("tr")?.querySelector("[data-sequence]");
  if (button) drawer.open(Number(button.dataset.sequence), button);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && drawer.id !== null) { drawer.close(true); tip(""); }
  const isTyping = /^(INPUT|SELECT|BUTTON|TEXTAREA|A)$/.test(event.target.tagName) && event.target.type !== "range";
  if (event.key === " " && !event.repeat && !isTyping && !$("key-dialog").open) { event.preventDefault(); pause(!view.isPaused); }
});

// A key is asked for where one is needed.
function askKey(why) {
  const dialog = $("key-dialog");
  $("key-why").textContent = why || "What this page shows is everybody's: it takes a key made by `kaiten keygen NAME --role operator`.";
  $("key-input").value = sessionStorage.getItem(KEY_NAME) || "";
  // Escape leaves the answer of before.
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  $("key-input").focus();
  return new Promise((done) => dialog.addEventListener("close", () => {
    if (dialog.returnValue === "use") {
      const key = $("key-input").value.trim();
      if (key) sessionStorage.setItem(KEY_NAME, key); else sessionStorage.removeItem(KEY_NAME);
    }
    done(dialog.returnValue === "use");
  }, {once: true}));
}
// Whoever has none, or cancelled, is asked again by the button.
let wakeUp = () => {};
$("key").addEventListener("click", async () => { if (await askKey("")) wakeUp(); });
async function keyGiven(error) {
  const woken = new Promise((done) => { wakeUp = done; });
  if (!$("key-dialog").open && await askKey(error.message)) return;
  await woken;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPaint(); for (const body of ["queue", "running"]) $(body).dataset.digest = ""; comparison.draw(); changed(); });
addEventListener("resize", () => { comparison.draw(); changed(); });
readPaint();
requestAnimationFrame(draw);
follow((told) => { live.take(told); if (view.story === live) followLive(); }, (name, why) => {
  if (state[0] !== name || state[1] !== why) { state = [name, why]; tellState(); }
}, keyGiven);
