// The KV block pool: one cell per physical block, as the engine holds it.

import { count, el, fitCanvas, heading, legend, setText, summary, whileInSight } from './dom.js';
import { hatch, inks, nobody, slotLetter, slotLook } from './theme.js';
import { explorable } from './tooltip.js';

const GAP = 3;
const LEAST = 14; // pixels of a cell: letters and counts can be read in it
const ARROWS = 16; // between the pool and the block table under it
const TABLE = 18;

export function mountBlocks(root, store) {
  const { head, figure } = heading('KV block pool', 'One cell is one block of the KV cache.');
  const canvas = el('canvas', { role: 'img', 'aria-label': 'KV block pool: all blocks are free' });
  const say = summary(canvas);
  const frame = el('div', { class: 'glass-canvas' }, canvas);
  const blue = () => slotLook(4);
  const key = legend([
    ['in use, filled from below', (c, w, h) => used(c, 2, 1, 10, h - 2, 0.6, [blue()], inks())],
    ['reserved, nothing in it', (c, w, h) => reserved(c, 2, 1, 10, h - 2, blue())],
    ['shared, with its count', (c, w, h) => used(c, 2, 1, 10, h - 2, 1, [slotLook(0), slotLook(1)], inks())],
    ['cached, idle', (c, w, h) => cached(c, 2, 1, 10, h - 2, inks())],
    ['free', (c, w, h) => free(c, 2, 1, 10, h - 2, inks())],
    ['just written', (c, w, h) => { used(c, 2, 1, 10, h - 2, 0.6, [blue()], inks()); written(c, 2, 1, 10, h - 2, inks()); }],
  ]);
  root.append(...head, frame, key.list);

  let shape = null;
  let cursor = null;

  function draw() {
    const { info, strip, blocks } = store;
    const ink = inks();
    key.draw(ink);
    if (!info || !frame.clientWidth) return;
    const per = info.block_size;
    setText(head[1], `One cell is one block of ${per} tokens. Colour and letter: the slot that owns it. `
      + 'Height of the fill: tokens in it.');
    const empty = strip.held ? `, with ${count(strip.empty_tokens)} of their token places empty` : '';
    setText(figure, `${strip.held} of ${info.num_blocks} held${empty}`);
    shape = layout(info.num_blocks, frame.clientWidth);
    const { columns, rows, wide, tall } = shape;
    const pool = rows * (tall + GAP) + 3;
    const height = pool + ARROWS + TABLE;
    const context = fitCanvas(canvas, frame.clientWidth, height);
    context.clearRect(0, 0, frame.clientWidth, height);
    const late = []; // borders go on top of their neighbours
    blocks.forEach((block, number) => {
      const x = 2 + (number % columns) * (wide + GAP);
      const y = 2 + Math.floor(number / columns) * (tall + GAP);
      context.globalAlpha = dimmed(block) ? 0.16 : 1;
      drawBlock(context, block, x, y, ink);
      context.globalAlpha = 1;
      if (block.written && block.written >= store.version - 1 && !dimmed(block)) late.push([x, y]);
    });
    late.forEach(([x, y]) => written(context, x, y, wide, tall, ink));
    drawTable(context, pool + ARROWS, ink);
    say(describe());
  }

  /** The block table of the request that is brought out: its logical blocks, each with an arrow to where it lies. */
  function drawTable(context, y, ink) {
    const key = store.isolated;
    const table = key === null ? [] : store.picture.table(key);
    context.font = `11px ${ink.font}`;
    context.textBaseline = 'middle';
    context.textAlign = 'left';
    context.fillStyle = ink.muted;
    if (!table.length) {
      const hint = frame.clientWidth < 500 ? 'Tap or point at a request to see its block table.'
        : 'Point at a request, here or in any panel, to see its block table; click to keep it.';
      const words = key === null ? hint
        : `#${key} holds no blocks at this moment.`;
      context.fillText(words, 2, y + TABLE / 2);
      return;
    }
    const title = `Block table of #${key}:`;
    context.fillText(title, 2, y + TABLE / 2);
    const left = context.measureText(title).width + 10;
    const slot = store.slotOf(key);
    const look = slot === null ? nobody : slotLook(slot);
    const each = Math.min(26, (frame.clientWidth - left - 4) / table.length);
    const { columns, wide, tall } = shape;
    table.forEach((number, index) => {
      const x = left + index * each;
      outline(context, x, y + 1, Math.max(2, each - 2), TABLE - 3, look.edge);
      if (each >= 16) {
        context.fillStyle = ink.ink;
        context.textAlign = 'center';
        context.fillText(`${index}`, x + each / 2 - 1, y + TABLE / 2);
      }
      const to = [2 + (number % columns) * (wide + GAP) + wide / 2, 2 + Math.floor(number / columns) * (tall + GAP) + tall - 2];
      arrow(context, [x + each / 2 - 1, y], to, look.edge, table.length > 24 ? 0.5 : 0.85);
    });
  }

  const dimmed = (block) => store.isolated !== null && !block.owners.includes(store.isolated);

  function drawBlock(context, block, x, y, ink) {
    const { wide, tall } = shape;
    if (block.state === 'free') return free(context, x, y, wide, tall, ink);
    if (block.state === 'cached') return cached(context, x, y, wide, tall, ink);
    const slots = block.owners.map((owner) => store.slotOf(owner));
    const looks = slots.map((slot) => (slot === null ? nobody : slotLook(slot)));
    if (block.state === 'reserved') reserved(context, x, y, wide, tall, looks[0] || nobody);
    else used(context, x, y, wide, tall, block.filled / store.info.block_size, looks, ink);
    const shared = block.refs > 1;
    const full = block.filled / store.info.block_size > 0.7;
    context.font = `600 ${Math.min(11, wide - 3)}px ${ink.font}`;
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    const words = shared ? `×${block.refs}` : slotLetter(slots[0]);
    const middle = y + tall / 2 + 0.5;
    if (shared) {
      const half = Math.min(wide / 2 - 1, context.measureText(words).width / 2 + 2);
      context.fillStyle = ink.panel;
      const high = Math.min(13, tall - 4); // of the colours, some is seen above and below
      context.fillRect(x + wide / 2 - half, middle - 0.5 - high / 2, 2 * half, high);
      context.fillStyle = ink.ink;
    } else {
      const partly = block.state === 'used' && !full; // half on the fill, half on the panel: with a halo
      context.fillStyle = full ? looks[0].text : ink.ink;
      if (partly) {
        context.strokeStyle = ink.panel;
        context.lineWidth = 3;
        context.strokeText(words, x + wide / 2, middle, wide - 2);
        context.lineWidth = 1;
      }
    }
    context.fillText(words, x + wide / 2, middle, wide - 2); // two letters, or ×12, drawn as narrow as need be
    return undefined;
  }

  function at(px, py) {
    if (!shape) return null;
    const column = Math.floor((px - 2) / (shape.wide + GAP));
    const number = Math.floor((py - 2) / (shape.tall + GAP)) * shape.columns + column;
    if (column < 0 || column >= shape.columns || !store.blocks[number]) return null;
    return explain(number);
  }

  function explain(number) {
    cursor = number;
    const { state, owners, index, refs, filled } = store.blocks[number];
    const size = store.info.block_size;
    const first = `Block ${number}: ${state === 'used' ? 'in use' : state}`;
    if (state === 'free') return { lines: [first] };
    if (state === 'cached') return { lines: [first, `${filled} tokens of a prefix, kept for the next who begins alike`] };
    const who = owners.map((key) => `#${key} in slot ${slotLetter(store.slotOf(key))}`).slice(0, 6);
    if (owners.length > 6) who.push(`and ${owners.length - 6} more`);
    return {
      key: owners.length === 1 ? owners[0] : null,
      lines: [first, `${filled} of ${size} tokens`, `piece ${index + 1} of its block table`,
        ...(refs > 1 ? [`shared by ${refs}:`] : []), ...who],
    };
  }

  function walk([dx, dy]) {
    if (!shape) return null;
    const here = Math.min(cursor ?? -1, store.blocks.length - 1); // a pool that was larger is gone
    const next = here + dx + dy * shape.columns;
    if (next < 0 || next >= store.blocks.length) return null;
    return {
      ...explain(next),
      x: (next % shape.columns + 1) * (shape.wide + GAP), y: Math.floor(next / shape.columns) * (shape.tall + GAP),
    };
  }

  function describe() {
    const { strip, info } = store;
    return `KV block pool: ${strip.held} of ${info.num_blocks} blocks held by requests, ${strip.cached} cached, ${strip.free} free`;
  }

  explorable(canvas, store, at, walk);
  store.onChange(whileInSight(root, store, draw));
}

/** Cells as large as the width allows: few rows for a small pool, small cells for a large one. */
export function layout(number, width) {
  const room = width - 4;
  const rowsWanted = number <= 64 ? 2 : number <= 200 ? 4 : number <= 400 ? 6 : number <= 800 ? 8 : 12;
  let columns = Math.max(1, Math.ceil(number / rowsWanted));
  columns = Math.min(columns, Math.floor((room + GAP) / (LEAST + GAP)));
  columns = Math.ceil(number / Math.ceil(number / columns)); // rows of equal length, if they can be
  const wide = Math.min(30, (room + GAP) / columns - GAP);
  const tall = Math.min(32, number > 800 ? wide : wide * 1.35);
  return { columns, rows: Math.ceil(number / columns), wide, tall };
}

function path(context, x, y, width, height) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.min(3, width / 4));
}

function outline(context, x, y, width, height, colour, dash = []) {
  path(context, x + 0.5, y + 0.5, width - 1, height - 1);
  context.setLineDash(dash);
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.stroke();
  context.setLineDash([]);
}

function free(context, x, y, width, height, ink) {
  outline(context, x, y, width, height, ink.line);
}

function cached(context, x, y, width, height, ink) {
  outline(context, x, y, width, height, ink.edge, [1.5, 2]);
  context.fillStyle = ink.edge;
  context.beginPath();
  context.arc(x + width / 2, y + height / 2, Math.min(1.2, width / 5), 0, 7);
  context.fill();
}

function reserved(context, x, y, width, height, look) {
  path(context, x, y, width, height);
  context.globalAlpha *= 0.5;
  context.fillStyle = hatch(context, look.edge, 5, 1);
  context.fill();
  context.globalAlpha *= 2;
  outline(context, x, y, width, height, look.edge);
}

/** A block with tokens in it; with several owners it is split into slanting stripes of their colours. */
function used(context, x, y, width, height, share, looks, ink) {
  context.save();
  path(context, x, y, width, height);
  context.clip();
  context.fillStyle = ink.panel;
  context.fillRect(x, y, width, height);
  const top = y + height * (1 - share);
  const parts = looks.slice(0, 4);
  parts.forEach((look, i) => {
    context.fillStyle = look.fill;
    if (parts.length === 1) context.fillRect(x, top, width, y + height - top);
    else {
      const lean = height * 0.35;
      const span = (width + lean) / parts.length;
      context.beginPath();
      context.moveTo(x + i * span - lean, y + height);
      context.lineTo(x + i * span, top);
      context.lineTo(x + (i + 1) * span + lean, top);
      context.lineTo(x + (i + 1) * span, y + height);
      context.fill();
    }
  });
  context.restore();
  outline(context, x, y, width, height, parts.length === 1 ? parts[0].edge : ink.muted);
}

/** A line that leaves upwards, and a head where it arrives from below. */
function arrow(context, [x0, y0], [x1, y1], colour, alpha) {
  context.globalAlpha = alpha;
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.2;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, y0 - ARROWS, x1, y1 + ARROWS + 6, x1, y1 + 4);
  context.stroke();
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 3, y1 + 5);
  context.lineTo(x1 + 3, y1 + 5);
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = 1;
}

function written(context, x, y, width, height, ink) {
  path(context, x - 0.5, y - 0.5, width + 1, height + 1);
  context.strokeStyle = ink.ink;
  context.lineWidth = 2;
  context.stroke();
  context.lineWidth = 1;
}
