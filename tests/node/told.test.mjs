// What the dashboard's page makes of events, beside what a client makes of them.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

const { Story } = vm.runInThisContext(`(() => {${readFileSync(`${process.env.KAITEN_DASHBOARD}/core.js`, "utf8")}; return {Story}; })()`);

test("a page knows what a client does, and whose every block is", () => {
  const story = new Story("live"), tablesOf = ({ blocks = [] }) => blocks.some((table) => table.length) ? blocks : [];
  for (const { told, known } of JSON.parse(readFileSync(process.env.KAITEN_TOLD))) {
    story.take(told);
    const sequences = Object.fromEntries([...story.core.sequences].map(([id, one]) => [id, [one.identity.id, one.place.state, one.place.worker_id,
      one.counts.tokens, one.counts.computed_tokens, tablesOf(one)]]));
    assert.deepEqual({ queue: story.core.queue, sequences }, known);
    for (const { worker_id, block_count, blocks_free } of story.core.workers.values())
      assert.equal(story.frames.at(-1).maps.get(worker_id).owner.filter(Boolean).length, block_count - blocks_free);
  }
});
