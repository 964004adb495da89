// What is fetched: with the key, if there is one, in a header and nowhere else.
const KEY_NAME = "kaiten-operator-key";
class Refused extends Error { constructor(message, status) { super(message); this.status = status; } }

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = {...(key && {authorization: `Bearer ${key}`}), ...(options.body && {"content-type": "application/json"})};
  const reply = await fetch(path, {...options, headers, cache: "no-store"});
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => null);
  throw new Refused(told?.error?.message || `${reply.status} ${reply.statusText}`, reply.status);
}

// Events of a stream, as they come; `heard` is called for whatever comes.
async function* eventsOf(reply, heard) {
  // Safari's streams are not iterable.
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done; ) {
    heard();
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
  }
}

// A tab that has been out of sight for so long is told nothing.
const HIDDEN_MS = 5000, OUT_OF_SIGHT = new Error("out of sight");
// A gateway says every five seconds that it is there, and after ten that nobody leads. Of one that hangs, or whose network is gone,
// no connection breaks.
const SILENT_MS = 20000;
const inSight = async () => {
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, {once: true}));
};
// Aborted by then, or when nothing was heard for too long.
function whileInSight() {
  const over = new AbortController();
  let hidden = 0, silent = 0;
  const look = () => { clearTimeout(hidden); if (document.hidden) hidden = setTimeout(() => over.abort(OUT_OF_SIGHT), HIDDEN_MS); };
  const heard = () => { clearTimeout(silent); silent = setTimeout(() => over.abort(new Error(`nothing was told for ${SILENT_MS / 1000} s`)), SILENT_MS); };
  document.addEventListener("visibilitychange", look, {signal: over.signal});
  look();
  heard();
  return {over, heard};
}

const RETRY_MS = [250, 500, 1000, 2000, 4000];
// For ever, through whatever happens to the connection; only a key that is wrong or missing is waited for.
async function follow(onCore, onState, keyGiven) {
  for (let tries = 0; ; ) {
    let wait = RETRY_MS[Math.min(tries++, RETRY_MS.length - 1)];
    await inSight();
    const {over, heard} = whileInSight(), {signal} = over;
    try {
      const reply = await ask("v1/watch?rows=true", {signal});
      for await (const told of eventsOf(reply, heard)) {
        if (told.error) throw new Error(told.error.message);
        tries = 0;
        onState("live", "");
        onCore(told);
      }
      throw new Error("the watch ended");
    } catch (error) {
      if (signal.reason === OUT_OF_SIGHT) tries = wait = 0;
      onState("away", (signal.reason ?? error).message);
      if (error.status === 401 || error.status === 403) { await keyGiven(error); tries = wait = 0; }
    } finally { over.abort(); }
    await new Promise((done) => setTimeout(done, wait));
  }
}

// Of the archive: a stretch of time, oldest first; never more than so many pages.
const PAGES_MAX = 5;
async function archived(sinceMs, untilMs) {
  const entries = [];
  let after = "";
  for (let pages = 0; pages < PAGES_MAX; pages++) {
    const query = `since_ms=${Math.floor(sinceMs)}&until_ms=${Math.ceil(untilMs)}&limit=1000${after && `&after=${after}`}`;
    const page = await (await ask(`v1/archive?${query}`)).json();
    // It is asked in whole milliseconds: what is after the last one is there already.
    entries.push(page.data.filter(({record}) => !record || record.unix_ms <= untilMs));
    if (!page.has_more) return {entries, isCut: false};
    after = page.last;
  }
  return {entries, isCut: true};
}
