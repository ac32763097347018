// Slots over time: a row is a slot, a column is a step.

import { button, count, el, fitCanvas, heading, legend, setText, summary, whileInSight } from './dom.js';
import { hatch, inks, slotLetter, slotLook } from './theme.js';
import { explorable } from './tooltip.js';

const LEFT = 44; // letters and the word "queue"
const RIGHT = 30; // the queue's length
const TOP = 14; // room for the name of a mode that begins, and for the marks of the first row
const QUEUE = 22;
const AXIS = 18;
const COLUMN = 4; // least width of a step
const ZOOMS = [4, 2, 1]; // the first steps are drawn wider, while there are few
const SENTENCES = {
  naive: 'Each row is a slot, each column a step. Naive: one request at a time, all others queue.',
  static: 'Each row is a slot, each column a step. Static: the next batch starts when the last request of this one is done.',
  continuous: 'Each row is a slot, each column a step. Continuous: a free slot takes the next waiting request at once, '
    + "in the middle of everyone else's decoding.",
};
const REASONS = {
  slots: 'no free slot', blocks: 'no free blocks', budget: 'no token budget left', batch: 'batch not over',
  prompt: 'its prompt is being computed',
};

export function reasonWords(reason, mode) {
  if (reason === 'batch' && mode === 'naive') return 'one at a time';
  return REASONS[reason] || '';
}

/** Returns what ends it. */
export function mountTimeline(root, store) {
  const { head, figure } = heading('Slots over time', SENTENCES.continuous);
  const canvas = el('canvas', { role: 'img', 'aria-label': 'Slots over time: nothing ran yet' });
  const say = summary(canvas);
  const frame = el('div', { class: 'glass-canvas' }, canvas);
  const blue = () => slotLook(4);
  const key = legend([
    ['prefill', (c, w, h) => { bar(c, 0, 2, w, h - 4, blue()); stripes(c, 0, 2, w, h - 4); }],
    ['decode', (c, w, h) => bar(c, 0, 2, w, h - 4, blue())],
    ['idle', (c, w, h) => idle(c, 0, 2, w, h - 4, inks())],
    ['injected mid-decode', (c) => triangle(c, 7, 4, 5, true, inks().ink, inks().panel)],
    ['preempted', (c) => triangle(c, 7, 10, 5, false, inks().alarm, inks().panel)],
  ]);
  root.append(...head, frame, key.list);

  let shape = null;
  let cursor = null;
  let zoom = 0; // steps of a factor: 0 fits what there is, more is closer
  let back = 0; // steps that the right edge lies before the newest

  const controls = el('div', { class: 'glass-zoom', role: 'group', 'aria-label': 'Zoom of the timeline' });
  for (const [sign, words, act] of [['−', 'Farther (S)', () => look(-1, 0)], ['+', 'Closer (W)', () => look(1, 0)],
    ['‹', 'Earlier steps (A)', () => look(0, 1)], ['›', 'Later steps (D)', () => look(0, -1)]]) {
    controls.append(button(sign, words, act));
  }
  figure.append(controls);

  /** Zoom by factors of one and a half, pan by a quarter of what is shown. */
  function look(closer, earlier) {
    zoom = Math.min(8, Math.max(-4, zoom + closer));
    controls.dataset.zoom = zoom;
    const quarter = Math.max(1, Math.round((shape?.fit || 100) / 4));
    back = Math.min(Math.max(0, store.columns.length - 10), Math.max(0, back + earlier * quarter));
    store.changed();
  }

  function lookByKey(event) {
    const dialog = document.querySelector('dialog[open]');
    if (dialog && !dialog.contains(root)) return; // what lies under a dialog keeps still
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.('input, textarea, select, [contenteditable]')) return;
    const act = { w: [1, 0], s: [-1, 0], a: [0, 1], d: [0, -1] }[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    look(...act);
  }

  document.addEventListener('keydown', lookByKey);
  canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // a plain wheel scrolls the page
    event.preventDefault();
    if (event.ctrlKey) look(event.deltaY < 0 ? 1 : -1, 0);
    else look(0, event.deltaY + event.deltaX < 0 ? 1 : -1);
  }, { passive: false });

  function draw() {
    const { info, strip, columns } = store;
    const ink = inks();
    key.draw(ink);
    if (!info || !frame.clientWidth) return;
    setText(head[1], SENTENCES[strip.mode]);
    setText(key.texts[2], strip.slot_steps
      ? `idle while others wait: ${count(strip.wasted)} of ${count(strip.slot_steps)} slot-steps in ${strip.mode} mode`
      : 'idle while others wait');
    const rows = info.max_num_seqs;
    const row = rows <= 8 ? 22 : rows <= 16 ? 15 : rows <= 32 ? 10 : 7;
    const width = frame.clientWidth;
    const height = TOP + rows * row + QUEUE + AXIS;
    const plot = width - LEFT - RIGHT;
    const most = Math.min(300, Math.max(20, Math.floor(plot / COLUMN)));
    const natural = most / ZOOMS.find((factor) => factor === 1 || columns.length <= most / factor);
    const fit = Math.min(plot, Math.max(8, Math.round(natural / 1.5 ** zoom)));
    back = Math.min(back, Math.max(0, columns.length - 10));
    const end = columns.length - back;
    const shown = columns.slice(Math.max(0, end - fit), end);
    const step = plot / fit;
    shape = { rows, row, shown, step, plot, fit };
    const context = fitCanvas(canvas, width, height);
    context.clearRect(0, 0, width, height);
    context.font = `10.5px ${ink.font}`;
    context.textBaseline = 'middle';
    for (let slot = 0; slot < rows; slot += 1) {
      const y = TOP + slot * row;
      context.fillStyle = ink.muted;
      context.textAlign = 'right';
      if (row >= 10 || slot % 2 === 0) context.fillText(slotLetter(slot), LEFT - 10, y + row / 2);
      context.fillStyle = ink.idle;
      context.fillRect(LEFT, Math.floor(y + row / 2), plot, 1);
      drawRow(context, slot, y, ink);
    }
    drawModes(context, ink);
    drawMarks(context, ink);
    drawQueue(context, TOP + rows * row + 4, ink);
    drawAxis(context, height - AXIS, ink);
    say(describe());
  }

  const x = (i) => Math.round(LEFT + i * shape.step);

  /** Runs of equal cells in one slot's row: [first column, end, cell, look]. */
  function drawRow(context, slot, y, ink) {
    const { shown, row } = shape;
    const tall = row - 3;
    const kindOf = (column) => {
      const cell = column.cells.get(slot);
      if (cell) return `${cell.key} ${cell.tokens < 0 ? 'prefill' : cell.tokens ? 'decode' : 'held'}`;
      return column.waiting ? 'idle' : '';
    };
    let start = 0;
    while (start < shown.length) {
      const kind = kindOf(shown[start]);
      let end = start + 1;
      while (end < shown.length && kindOf(shown[end]) === kind) end += 1;
      if (kind === 'idle') idle(context, x(start), y + 1, x(end) - x(start), tall, ink);
      else if (kind) drawRun(context, slot, y + 1, start, end, tall, shown[start].cells.get(slot), kind);
      start = end;
    }
    drawBounds(context, slot, y + 1, tall, ink);
  }

  function drawRun(context, slot, y, start, end, tall, cell, kind) {
    const look = slotLook(slot);
    const wide = x(end) - x(start);
    context.globalAlpha = dimmed(cell.key) ? 0.16 : 1;
    if (kind.endsWith('held')) {
      context.strokeStyle = look.edge;
      context.strokeRect(x(start) + 0.5, y + 0.5, wide - 1, tall - 1);
    } else {
      bar(context, x(start), y, wide, tall, look);
      if (cell.tokens < 0) stripes(context, x(start), y, wide, tall);
    }
    context.globalAlpha = 1;
  }

  /** A thin gap where one request follows another in its slot, and the number of each where it fits. */
  function drawBounds(context, slot, y, tall, ink) {
    const { shown } = shape;
    let start = 0;
    while (start < shown.length) {
      const key = shown[start].cells.get(slot)?.key;
      let end = start + 1;
      while (end < shown.length && shown[end].cells.get(slot)?.key === key) end += 1;
      if (key) {
        if (start > 0) {
          context.fillStyle = ink.panel;
          context.fillRect(x(start), y - 1, 1.5, tall + 2);
        }
        const words = `#${key}`;
        if (tall >= 10 && x(end) - x(start) > 34 && !dimmed(key)) {
          const prefill = shown.slice(start, end).findIndex((column) => column.cells.get(slot).tokens > 0);
          context.fillStyle = slotLook(slot).text;
          context.textAlign = 'left';
          context.font = `600 9px ${ink.font}`;
          const at = x(start + Math.max(0, prefill)) + 4;
          if (at + 24 < x(end)) context.fillText(words, at, y + tall / 2 + 0.5);
          context.font = `10.5px ${ink.font}`;
        }
      }
      start = end;
    }
  }

  function drawModes(context, ink) {
    const { shown, rows, row } = shape;
    context.textAlign = 'left';
    context.font = `600 10.5px ${ink.font}`;
    context.fillStyle = ink.ink;
    let free = Infinity; // from the right: of names that would lie on each other, the latest is written
    for (let i = shown.length - 1; i > 0; i -= 1) {
      if (shown[i].mode === shown[i - 1].mode) continue;
      context.fillRect(x(i) - 1, 2, 1.5, TOP + rows * row);
      if (x(i) + 8 + context.measureText(shown[i].mode).width > free) continue;
      context.fillText(shown[i].mode, x(i) + 4, 6);
      free = x(i);
    }
    context.font = `10.5px ${ink.font}`;
  }

  function drawMarks(context, ink) {
    const { shown, row } = shape;
    if (!shown.length) return;
    const first = shown[0].step;
    for (const { step, slot, kind, key } of store.marks) {
      const i = step - first;
      if (i < 0 || i > shown.length || dimmed(key)) continue;
      const y = TOP + slot * row;
      const size = row >= 12 ? 4.5 : 3.5;
      if (kind === 'preempted') triangle(context, x(i), y + row - 1, size, false, ink.alarm, ink.panel);
      else if (kind === 'injected') triangle(context, x(i) + 1, y - 1, size, true, ink.ink, ink.panel);
    }
  }

  function drawQueue(context, y, ink) {
    const { shown, plot } = shape;
    const most = Math.max(4, ...shown.map((column) => column.waiting));
    const tall = QUEUE - 6;
    context.fillStyle = ink.muted;
    context.textAlign = 'right';
    context.fillText('queue', LEFT - 6, y + tall / 2);
    context.fillStyle = ink.idle;
    context.fillRect(LEFT, y + tall, plot, 1);
    context.fillStyle = ink.muted;
    shown.forEach((column, i) => {
      const high = column.waiting ? Math.max(1.5, (tall * column.waiting) / most) : 0;
      context.fillRect(x(i), y + tall - high, x(i + 1) - x(i), high);
    });
    context.fillStyle = ink.ink;
    context.textAlign = 'left';
    context.fillText(store.strip.waiting ? `${store.strip.waiting}` : '0', LEFT + plot + 6, y + tall / 2);
  }

  function drawAxis(context, y, ink) {
    const { shown, step } = shape;
    if (!shown.length) {
      context.fillStyle = ink.muted;
      context.textAlign = 'left';
      context.fillText(store.isRecording ? 'before the first step' : 'No step yet. Send a prompt, or the 8 examples.', LEFT, y + 10);
      return;
    }
    const every = [10, 20, 25, 50, 100].find((n) => n * step > 70) || 200;
    context.fillStyle = ink.muted;
    context.textAlign = 'center';
    shown.forEach((column, i) => {
      const words = count(column.step);
      const fits = x(i) - context.measureText(words).width / 2 > LEFT - 4; // else it would meet the word on its left
      if (column.step % every === 0 && fits) context.fillText(words, x(i), y + 10);
    });
    context.textAlign = 'right';
    context.fillText('step', LEFT - 6, y + 10);
  }

  const dimmed = (key) => store.isolated !== null && store.isolated !== key;

  function at(px, py) {
    if (!shape) return null;
    const slot = Math.floor((py - TOP) / shape.row);
    const column = shape.shown[Math.floor((px - LEFT) / shape.step)];
    if (!column || slot < 0) return null;
    cursor = { slot: Math.min(slot, shape.rows), column: Math.floor((px - LEFT) / shape.step) };
    if (slot >= shape.rows) return { lines: stepLines(column) };
    const cell = column.cells.get(slot);
    if (!cell) {
      return { lines: [`Slot ${slotLetter(slot)}, step ${count(column.step)}`,
        column.waiting ? `idle, while ${column.waiting} waited` : 'idle, nobody waited'] };
    }
    const mark = store.marks.find((m) => m.step === column.step && m.slot === slot);
    const work = cell.tokens < 0 ? `prefill: ${-cell.tokens} prompt tokens`
      : cell.tokens ? `decode: ${cell.tokens} token${cell.tokens > 1 ? 's' : ''}` : 'held, no token budget in this step';
    return {
      key: cell.key,
      lines: [`Slot ${slotLetter(slot)}, request #${cell.key}`, `step ${count(column.step)}, ${column.mode}`, work,
        ...(mark ? [mark.kind === 'injected' ? 'injected while others decoded' : mark.kind] : [])],
    };
  }

  function stepLines(column) {
    const reason = reasonWords(column.reason, column.mode);
    return [`Step ${count(column.step)}, ${column.mode}`,
      `${column.waiting} waiting${column.waiting && reason ? `: ${reason}` : ''}`, `${column.cells.size} slots in use`];
  }

  function walk([dx, dy]) {
    if (!shape?.shown.length) return null;
    cursor = cursor || { slot: 0, column: shape.shown.length };
    cursor.column = Math.min(shape.shown.length - 1, Math.max(0, cursor.column + dx));
    cursor.slot = Math.min(shape.rows, Math.max(0, cursor.slot + dy)); // under the slots, the queue
    const px = LEFT + (cursor.column + 0.5) * shape.step;
    const py = TOP + (cursor.slot + 0.5) * shape.row;
    return { ...at(px, py), x: px, y: py };
  }

  function describe() {
    const { strip, columns } = store;
    if (!columns.length) return 'Slots over time: nothing ran yet';
    return `Slots over time, ${strip.mode} mode, step ${strip.step}: ${strip.running} of ${store.info.max_num_seqs} slots busy, `
      + `${strip.waiting} waiting, ${strip.wasted} slot-steps idle while others waited`;
  }

  explorable(canvas, store, at, walk);
  store.onChange(whileInSight(root, store, draw));
  return () => document.removeEventListener('keydown', lookByKey);
}

function bar(context, x, y, width, height, look) {
  context.fillStyle = look.fill;
  context.fillRect(x, y, width, height);
  context.fillStyle = look.edge;
  context.fillRect(x, y, width, 1);
  context.fillRect(x, y + height - 1, width, 1);
}

function stripes(context, x, y, width, height) {
  context.fillStyle = hatch(context, 'rgba(0,0,0,0.55)', 4, 1.5);
  context.fillRect(x, y, width, height);
}

function idle(context, x, y, width, height, ink) {
  context.fillStyle = hatch(context, ink.hatch, 6, 1);
  context.fillRect(x, y, width, height);
}

function triangle(context, x, y, size, down, colour, halo) {
  const tip = down ? size : -size;
  context.beginPath();
  context.moveTo(x - size * 0.85, y - tip / 4);
  context.lineTo(x + size * 0.85, y - tip / 4);
  context.lineTo(x, y + tip);
  context.closePath();
  context.lineJoin = 'round';
  context.strokeStyle = halo;
  context.lineWidth = 2;
  context.stroke();
  context.fillStyle = colour;
  context.fill();
  context.lineWidth = 1;
}
