// Canvases. Colours are the page's own, read once per scheme.

let paint = {};
function readPaint() {
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  paint = {isDark, text: of(isDark ? "--text-dark" : "--text-light"), dim: of(isDark ? "--dim-dark" : "--dim-light"),
    line: of(isDark ? "--line-dark" : "--line-light"), page: of(isDark ? "--page-dark" : "--page-light"),
    soft: of(isDark ? "--soft-dark" : "--soft-light"), accent: of(isDark ? "--accent-dark" : "--accent-light"),
    bad: of(isDark ? "--bad-dark" : "--bad-light"), warm: isDark ? "#e0a458" : "#b06a10", hues: new Map(), rgb: new Map(), heat: []};
}
// A request's colour: full while it decodes, pale while its prompt is computed.
function hue(owner, isPale) {
  const key = owner.hue * 2 + isPale;
  let colour = paint.hues.get(key);
  if (!colour) {
    const [light, chroma] = paint.isDark ? [isPale ? .42 : .68, isPale ? .07 : .13] : [isPale ? .88 : .70, isPale ? .07 : .14];
    paint.hues.set(key, colour = oklch(light, chroma, owner.hue));
  }
  return colour;
}
// In sRGB, so that pixels can be written as well as filled.
function oklch(light, chroma, hueDegrees) {
  const a = chroma * Math.cos(hueDegrees * Math.PI / 180), b = chroma * Math.sin(hueDegrees * Math.PI / 180);
  const l = (light + .3963377774 * a + .2158037573 * b) ** 3, m = (light - .1055613458 * a - .0638541728 * b) ** 3;
  const s = (light - .0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + .2309699292 * s, -1.2684380046 * l + 2.6097574011 * m - .3413193965 * s,
    -.0041960863 * l - .7034186147 * m + 1.707614701 * s];
  const bytes = linear.map((x) => Math.round(255 * Math.max(0, Math.min(1, x <= .0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - .055))));
  return `rgb(${bytes.join(" ")})`;
}
function pixel(colour) {
  let value = paint.rgb.get(colour);
  if (value === undefined) {
    const digits = colour.startsWith("#") ? (colour.length === 4 ? [...colour.slice(1)].map((d) => d + d) : colour.slice(1).match(/../g)).map((d) => parseInt(d, 16))
      : colour.match(/\d+/g).map(Number);
    paint.rgb.set(colour, value = (255 << 24 | digits[2] << 16 | digits[1] << 8 | digits[0]) >>> 0);
  }
  return value;
}

// A canvas as large as its box, in device pixels; drawn in those of CSS.
function fitted(canvas) {
  const ratio = Math.min(2, devicePixelRatio || 1), width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return {context, width, height, ratio};
}
function hatch(context) {
  if (hatch.of !== paint.isDark || !hatch.pattern) {
    const tile = document.createElement("canvas"), size = 6;
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.strokeStyle = paint.isDark ? "rgb(255 255 255 / .30)" : "rgb(0 0 0 / .28)";
    pen.lineWidth = 1.4;
    for (const shift of [-size, 0, size]) { pen.beginPath(); pen.moveTo(shift, size); pen.lineTo(shift + size, 0); pen.stroke(); }
    hatch.pattern = context.createPattern(tile, "repeat");
    hatch.of = paint.isDark;
  }
  return hatch.pattern;
}
function cellRun(context, x, y, width, height, owner, what) {
  const kind = what & KIND;
  if (kind === WAITS) {
    context.fillStyle = paint.soft;
    context.fillRect(x, y, width, height);
    context.fillStyle = hue(owner, false);
    context.fillRect(x, y + height / 2 - .75, width, 1.5);
  } else {
    const isPrompt = kind !== DECODE;
    context.fillStyle = hue(owner, isPrompt);
    context.fillRect(x, y, width, height);
    if (isPrompt && height >= 3) { context.fillStyle = hatch(context); context.fillRect(x, y, width, height); }
    if (kind === FIRST) { context.fillStyle = hue(owner, false); context.fillRect(x + width - Math.max(1.5, width * .4), y, Math.max(1.5, width * .4), height); }
  }
  if (what & (FINISHED | PREEMPTED)) {
    context.fillStyle = what & PREEMPTED ? paint.bad : paint.text;
    const end = Math.min(width, what & PREEMPTED ? 3 : 2);
    context.fillRect(x + width - end, y, end, height);
  }
}

const GUTTER = 44, STRIPS = [["tokens", 46], ["step", 34], ["queue", 30]], STRIP_GAP = 16;
const STRIPS_HEIGHT = STRIPS.reduce((sum, [, height]) => sum + height + STRIP_GAP, 0);

// Iterations from left to right, the newest at the right; a row per slot, and below what each step took.
class Ribbon {
  constructor(canvas, hasStrips = true) { Object.assign(this, {canvas, hasStrips, columnWidth: 8, cursor: null, shown: 0}); }
  get columns() { return Math.max(1, Math.floor((this.canvas.clientWidth - GUTTER) / this.columnWidth)); }
  rowHeight(track) { return Math.max(1, (this.canvas.clientHeight - (this.hasStrips ? STRIPS_HEIGHT : 0)) / track.slots); }
  // The column and the slot at a point.
  at(track, x, y) {
    const index = Math.floor(this.shown - (this.canvas.clientWidth - x) / this.columnWidth);
    const slot = Math.floor(y / this.rowHeight(track));
    return x < GUTTER || !track.column(index) ? null : {index, slot: slot < track.slots ? slot : null};
  }
  draw(track, shown) {
    const {context, width, height} = fitted(this.canvas);
    this.shown = shown;
    if (!track || !track.count) return;
    const columnWidth = this.columnWidth, rowHeight = this.rowHeight(track), left = (index) => width - (shown - index) * columnWidth;
    const first = Math.max(track.oldest, Math.floor(shown - (width - GUTTER) / columnWidth)), last = Math.min(track.count, Math.ceil(shown));
    const gap = rowHeight >= 5 ? 1 : 0, owners = track.owners;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    context.fillStyle = paint.soft;
    context.fillRect(GUTTER, 0, width - GUTTER, rowHeight * track.slots);
    context.font = `${Math.min(12, rowHeight - 3)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    for (let slot = 0; slot < track.slots; slot++) {
      const y = slot * rowHeight;
      let labelled = 0, labelEnd = -1;
      track.runs(slot, first, last, (from, to, number, what) => {
        const owner = owners.at(number), x = left(from), wide = (to - from) * columnWidth - (columnWidth >= 5 ? .5 : 0);
        cellRun(context, x, y, wide, rowHeight - gap, owner, what);
        const visible = x + wide - Math.max(x, GUTTER);
        if (rowHeight >= 13 && (what & KIND) === DECODE && visible > 54 && (labelled !== number || x > labelEnd + 160)) {
          labelled = number;
          context.fillStyle = paint.isDark ? "#10151c" : "#fff";
          const text = shortName(owner), start = Math.max(x, GUTTER) + 4, most = visible - 8;
          if (context.measureText(text).width <= most) { context.fillText(text, start, y + (rowHeight - gap) / 2 + .5); labelEnd = start + 60; }
        }
      });
      if (gap) { context.fillStyle = paint.page; context.fillRect(GUTTER, y + rowHeight - gap, width - GUTTER, gap); }
    }
    context.fillStyle = paint.text;
    for (let index = first; index < last; index++) if (track.column(index)?.isAfterUntold) context.fillRect(left(index) - 1, 0, 2, rowHeight * track.slots);
    if (this.hasStrips) this.strips(context, track, first, last, left, rowHeight * track.slots, width);
    this.crosshair(context, track, left, rowHeight, height);
    context.restore();
    this.gutter(context, track, rowHeight);
  }
  gutter(context, track, rowHeight) {
    const every = [1, 2, 4, 8, 16, 32, 64, 128].find((step) => step * rowHeight >= 13) || 256;
    context.fillStyle = paint.dim;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let slot = 0; slot < track.slots; slot += every) context.fillText(slot, GUTTER - 8, (slot + .5) * rowHeight);
    context.textAlign = "left";
  }
  strips(context, track, first, last, left, top, width) {
    let tokensMax = 1, stepMax = 1, queueMax = 1, budget = 0;
    for (let index = first; index < last; index++) {
      const column = track.column(index);
      if (!column) continue;
      tokensMax = Math.max(tokensMax, decodedOf(column) + column.chunked);
      stepMax = Math.max(stepMax, column.stepUs);
      queueMax = Math.max(queueMax, column.waiting || 0);
      budget = Math.max(budget, column.budget || 0);
    }
    const newest = track.column(Math.min(track.count, Math.ceil(this.shown)) - 1);
    const scale = budget && budget < 3 * tokensMax ? Math.max(budget, tokensMax) : tokensMax * 1.15;
    const titles = {tokens: `tokens of the step  ${newest ? decodedOf(newest) + newest.chunked : 0}${newest?.budget ? ` of ${newest.budget} (budget)` : ""}`,
      step: `step  ${milliseconds((newest?.stepUs || 0) / 1000)}`, queue: `waiting  ${newest?.waiting ?? "?"}`};
    const bar = Math.max(1, this.columnWidth - (this.columnWidth >= 4 ? 1 : 0));
    let y = top;
    context.textBaseline = "alphabetic";
    for (const [name, height] of STRIPS) {
      y += STRIP_GAP;
      context.fillStyle = paint.dim;
      context.font = "11px system-ui, sans-serif";
      context.fillText(titles[name], GUTTER + 2, y - 4);
      context.fillStyle = paint.line;
      context.fillRect(GUTTER, y + height - .5, width, 1);
      for (let index = first; index < last; index++) {
        const column = track.column(index);
        if (!column) continue;
        const x = left(index);
        if (name === "tokens") {
          const decodes = decodedOf(column) / scale * height, chunks = column.chunked / scale * height;
          context.fillStyle = paint.accent;
          context.fillRect(x, y + height - decodes, bar, decodes);
          context.fillStyle = paint.warm;
          context.fillRect(x, y + height - decodes - chunks, bar, chunks);
          // A step in which somebody decodes may have fewer than one in which nobody does.
          if (column.budget && column.budget <= scale) { context.fillStyle = paint.bad; context.fillRect(x, y + height - column.budget / scale * height, this.columnWidth, 1); }
        } else {
          const value = name === "step" ? column.stepUs / stepMax : (column.waiting || 0) / queueMax;
          context.fillStyle = name === "step" ? paint.dim : paint.bad;
          context.fillRect(x, y + height - value * height, bar, value * height);
        }
      }
      y += height;
    }
  }
  crosshair(context, track, left, rowHeight, height) {
    if (!this.cursor || !track.column(this.cursor.index)) return;
    const x = left(this.cursor.index);
    context.fillStyle = paint.isDark ? "rgb(255 255 255 / .16)" : "rgb(0 0 0 / .12)";
    context.fillRect(x, 0, this.columnWidth, height);
    if (this.cursor.slot === null) return;
    context.strokeStyle = paint.text;
    context.lineWidth = 1.5;
    context.strokeRect(x - .5, this.cursor.slot * rowHeight - .5, this.columnWidth + 1, rowHeight + 1);
  }
}

// The KV blocks of a worker, in the order of their numbers.
class BlockMap {
  constructor(canvas) { this.canvas = canvas; this.cursor = null; }
  shape(count) {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    // Of more blocks than there are pixels a cell is several.
    const each = Math.max(1, Math.ceil(count / Math.max(1, width * height))), cells = Math.ceil(count / each);
    let cell = Math.max(1, Math.floor(Math.sqrt(width * height / Math.max(1, cells))));
    while (cell > 1 && Math.ceil(cells / Math.floor(width / cell)) * cell > height) cell--;
    cell = Math.min(cell, 26);
    return {cell, each, cells, across: Math.max(1, Math.floor(width / cell))};
  }
  at(count, x, y) {
    const {cell, each, across} = this.shape(count), block = (Math.floor(y / cell) * across + Math.floor(x / cell)) * each;
    return x >= 0 && Math.floor(x / cell) < across && block < count ? block : null;
  }
  draw(map, owners, chosen) {
    const {context, ratio} = fitted(this.canvas);
    if (!map?.owner.length) return;
    const {owner, held, cached} = map, {cell, each, cells, across} = this.shape(owner.length), size = Math.round(cell * ratio);
    const wide = this.canvas.width, image = context.createImageData(wide, Math.min(this.canvas.height, Math.ceil(cells / across) * size));
    const pixels = new Uint32Array(image.data.buffer), inner = size >= 4 ? size - 1 : size, tall = image.height;
    const free = pixel(paint.soft), evictable = pixel(paint.dim), white = pixel(paint.page), dark = pixel(paint.text);
    const put = (x, y, w, h, colour) => {
      for (let row = y; row < Math.min(y + h, tall); row++) pixels.fill(colour, row * wide + x, row * wide + x + w);
    };
    for (let at = 0; at < cells; at++) {
      const block = BlockMap.shown(map, at * each, each), x = at % across * size, y = Math.floor(at / across) * size, number = owner[block];
      const colour = number ? pixel(hue(owners.at(number), false)) : cached[block] ? evictable : free;
      put(x, y, inner, inner, colour);
      if (size < 4) continue;
      const third = Math.max(1, Math.floor(inner / 3));
      if (held[block] > 1) put(x + third, y + third, inner - 2 * third, inner - 2 * third, white);
      if (number && cached[block]) put(x + inner - third, y + inner - third, third, third, dark);
    }
    context.putImageData(image, 0, 0);
    context.strokeStyle = paint.text;
    context.lineWidth = 1.5;
    for (let at = 0; at < cells; at++) {
      if (at * each !== this.cursor && !(cell >= 4 && chosen && owner[at] === chosen)) continue;
      context.strokeRect(at % across * cell - .5, Math.floor(at / across) * cell - .5, cell, cell);
    }
  }
  // Of the blocks of a cell the first that is held, or else cached.
  static shown({owner, cached}, first, each) {
    const end = Math.min(first + each, owner.length);
    for (const holds of [owner, cached]) for (let block = first; each > 1 && block < end; block++) if (holds[block]) return block;
    return first;
  }
}

const HEAT_GUTTER = 54, HEAT_COLOURS = 40;
function heatColour(number) {
  const share = number / HEAT_COLOURS;
  return paint.heat[number] ||= oklch(paint.isDark ? .35 + .5 * share : .93 - .52 * share, .05 + .13 * share, 250 - 210 * share);
}
// Latencies: a second a column, sizes upwards.
class HeatMap {
  constructor(canvas, kind) { this.canvas = canvas; this.kind = kind; }
  bins(heat, now) {
    const across = Math.min(HEAT_BINS, Math.max(20, Math.floor((this.canvas.clientWidth - HEAT_GUTTER) / 5)));
    return {across, last: Math.floor(now / 1000)};
  }
  draw(heat, now) {
    const {context, width, height} = fitted(this.canvas), {across, last} = this.bins(heat, now), bins = heat.kinds[this.kind];
    let low = HEAT_ROWS, high = 0, most = 1;
    for (const [bin, counts] of bins) if (bin > last - across && bin <= last) counts.forEach((count, row) => {
      if (count) { low = Math.min(low, row); high = Math.max(high, row); most = Math.max(most, count); }
    });
    if (low > high) { low = 4; high = 14; }
    low = Math.max(0, low - 1); high = Math.min(HEAT_ROWS - 1, Math.max(high + 1, low + 7));
    this.range = {low, high};
    const tall = (height - 16) / (high - low + 1), wide = (width - HEAT_GUTTER) / across;
    context.fillStyle = paint.soft;
    context.fillRect(HEAT_GUTTER, 0, width - HEAT_GUTTER, height - 16);
    for (const [bin, counts] of bins) {
      if (bin <= last - across || bin > last) continue;
      counts.forEach((count, row) => {
        if (!count) return;
        context.fillStyle = heatColour(Math.round(HEAT_COLOURS * Math.log1p(count) / Math.log1p(most)));
        context.fillRect(HEAT_GUTTER + (bin - last + across - 1) * wide, (high - row) * tall, Math.max(1, wide - .5), Math.max(1, tall - .5));
      });
    }
    context.fillStyle = paint.dim;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(14 / tall));
    for (let row = low + 1; row <= high; row += every) context.fillText(milliseconds(Heat.msOf(row)), HEAT_GUTTER - 4, (high - row + 1) * tall);
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(`${across} s ago`, HEAT_GUTTER, height - 3);
    context.textAlign = "right";
    context.fillText("now", width - 2, height - 3);
    context.textAlign = "left";
  }
}

function milliseconds(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 100000 ? 0 : ms >= 10000 ? 1 : 2)} s`;
  return `${ms >= 100 ? Math.round(ms) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}
function shortName(owner) {
  const [, request = ""] = owner.id.split(/:(.*)/s);
  const name = request ? (request.length > 12 ? request.slice(0, 8) : request) : `#${owner.sequenceId % 100000}`;
  return owner.choice ? `${name}/${owner.choice}` : name;
}
