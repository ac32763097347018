// Anatomy of a step: where its milliseconds go, and what was in its batch.

import { count, el, figure, fitCanvas, heading, legend, setText, summary, whileInSight } from './dom.js';
import { inks } from './theme.js';
import { explorable } from './tooltip.js';

const STAGES = ['schedule', 'prepare', 'forward', 'sample', 'postprocess']; // in the order of an event's times
const HEIGHT = 150;
const BATCH = 42; // the lower part: tokens in the batch
const AXIS = 14;
const LEFT = 40;
const BAR = 9;

export function mountAnatomy(root, store) {
  const { head, figure: note } = heading('Anatomy of a step', 'Milliseconds by stage; below, the tokens in the batch.');
  const canvas = el('canvas', { role: 'img', 'aria-label': 'Anatomy of a step: nothing ran yet' });
  const say = summary(canvas);
  const frame = el('div', { class: 'glass-canvas' }, canvas);
  const square = (paint) => (c, w, h) => { c.fillStyle = paint(); c.fillRect(2, 2, w - 4, h - 4); };
  const key = legend([...['forward', 'prepare', 'sample', 'schedule', 'postprocess'].map((stage) => [stage, square(() => inks()[stage])]),
    ['prefill tokens', square(() => inks().edge)], ['decode tokens', square(() => inks().ink)]]);
  root.append(...head, frame, key.list);
  let shape = null;
  let cursor = null;

  function draw() {
    const ink = inks();
    key.draw(ink);
    if (!store.info || !frame.clientWidth) return;
    const width = frame.clientWidth;
    const plot = width - LEFT - 4;
    const shown = store.columns.slice(-Math.max(1, Math.floor(plot / BAR)));
    shape = { shown, plot };
    const context = fitCanvas(canvas, width, HEIGHT + BATCH);
    context.clearRect(0, 0, width, HEIGHT + BATCH);
    context.font = `10.5px ${ink.font}`;
    context.textBaseline = 'middle';
    const totals = shown.map((column) => column.times.reduce((sum, ms) => sum + ms, 0));
    // One slow step (the first, say) must not flatten the rest: the scale ends at the 95th percentile, and some.
    const ranked = [...totals].sort((a, b) => a - b);
    const top = nice((ranked[Math.floor(ranked.length * 0.95)] || 10) * 1.15);
    drawScale(context, top, ink, plot);
    const floor = HEIGHT - AXIS;
    const scale = (floor - 8) / top;
    const batches = shown.map(batch);
    const most = Math.max(8, ...batches.map(([prefill, decode]) => prefill + decode));
    shown.forEach((column, i) => {
      const x = LEFT + i * BAR;
      let y = floor;
      for (const stage of [2, 1, 3, 0, 4]) {
        const high = Math.min(column.times[stage] * scale, y - 2);
        context.fillStyle = ink[STAGES[stage]];
        context.fillRect(x, y - high, BAR - 2, high);
        y -= high;
      }
      const [prefill, decode] = batches[i];
      const unit = (BATCH - 8) / most;
      const base = HEIGHT + BATCH - 4;
      context.fillStyle = ink.ink;
      context.fillRect(x, base - decode * unit, BAR - 2, decode * unit);
      context.fillStyle = ink.edge;
      context.fillRect(x, base - (decode + prefill) * unit, BAR - 2, prefill * unit);
    });
    context.fillStyle = ink.muted;
    context.textAlign = 'right';
    context.fillText(count(most), LEFT - 6, HEIGHT + 6);
    context.fillText('0', LEFT - 6, HEIGHT + BATCH - 6);
    context.fillStyle = ink.line;
    context.fillRect(LEFT, HEIGHT + BATCH - 4, plot, 1);
    if (totals.length) {
      const mean = totals.reduce((sum, ms) => sum + ms, 0) / totals.length;
      const forward = shown.reduce((sum, column) => sum + column.times[2], 0) / totals.length;
      setText(note, `${figure(mean)} ms, ${Math.round((100 * forward) / mean)} % of it forward`);
      say(`Anatomy of a step: ${note.textContent}, mean of the last ${shown.length} steps`);
    }
  }

  function drawScale(context, top, ink, plot) {
    const floor = HEIGHT - AXIS;
    context.textAlign = 'right';
    for (const share of [0, 0.5, 1]) {
      const y = floor - share * (floor - 8);
      context.fillStyle = ink.line;
      context.fillRect(LEFT, Math.round(y), plot, 1);
      context.fillStyle = ink.muted;
      context.fillText(share ? `${Number((top * share).toPrecision(3))}` : '0 ms', LEFT - 6, y);
    }
  }

  function at(px) {
    const i = Math.floor((px - LEFT) / BAR);
    const column = shape?.shown[i];
    if (!column) return null;
    cursor = i;
    const [prefill, decode] = batch(column);
    return { lines: [`Step ${count(column.step)}, ${column.mode}`, ...STAGES.map((stage, n) => `${stage}: ${column.times[n].toFixed(1)} ms`),
      `batch: ${prefill} prefill + ${decode} decode tokens`] };
  }

  function walk([dx]) {
    if (!shape?.shown.length) return null;
    cursor = Math.min(shape.shown.length - 1, Math.max(0, (cursor ?? shape.shown.length) + dx));
    const x = LEFT + (cursor + 0.5) * BAR;
    return { ...at(x), x, y: HEIGHT / 2 };
  }

  explorable(canvas, store, at, walk);
  store.onChange(whileInSight(root, store, draw));
}

function batch(column) {
  let prefill = 0;
  let decode = 0;
  for (const { tokens } of column.cells.values()) {
    if (tokens < 0) prefill -= tokens;
    else decode += tokens;
  }
  return [prefill, decode];
}

/** A round number at or above: 1, 2, 5, 10, 20, ... */
function nice(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 4, 5, 8, 10].find((factor) => factor * power >= number) * power;
}
