// Recorded runs, one or several side by side on one clock: a race, or a trace from elsewhere. Needs no server.

import { mountAnatomy } from './anatomy.js';
import { mountBlocks } from './blocks.js';
import { button, count, el, figure, fitCanvas, keyIsTaken, setText, summary, wantsCalm } from './dom.js';
import { mountStrip } from './metrics.js';
import { SPEEDS } from './player.js';
import { Store } from './store.js';
import { MODE_DASHES, inks, onThemeChange } from './theme.js';
import { mountTimeline } from './timeline.js';

const TICK = 33; // milliseconds between two pictures
const CURVE = 120;
const NOTCHES = 2000; // of the slider: whole numbers, or rounding would keep it from the very end
const PACE = 20; // seconds in which a run is played at "1×" of its own, if it lasts longer or much shorter

/**
 * Show arms, each {title, frames, mode}, in `root`. words: what stands above the curve. all: with the metric
 * strip and the anatomy of a step too. Returns {close, begin, rewind, view}.
 */
export function mountPlayback(root, arms, words = '', all = false) {
  const lanes = arms.map((arm, place) => makeLane(arm, place, all));
  const end = Math.max(...lanes.map((lane) => lane.end), 0.001);
  let time = 0;
  let speed = SPEEDS.find((times) => end / times <= PACE) ?? SPEEDS[SPEEDS.length - 1];
  let timer = 0;

  const toggle = button('Play', 'Play or pause (Space)', () => (timer ? pause() : play()));
  const slider = el('input', { type: 'range', min: '0', max: `${NOTCHES}`, 'aria-label': 'Moment shown' });
  const choose = el('select', { 'aria-label': 'Speed of playing' }, ...SPEEDS.map((times) => el('option', { value: `${times}` }, `${times}×`)));
  choose.value = `${speed}`;
  const when = el('span', { class: 'glass-when' });
  const bar = el('div', { class: 'glass-transport', role: 'group', 'aria-label': 'Time' },
    el('div', { class: 'glass-transport-buttons' }, button('«', 'To the start', rewind),
      button('‹', 'One step back (←)', () => step(-1)), toggle, button('›', 'One step on (→)', () => step(1)),
      button('»', 'To the end', () => { pause(); go(end); })), slider, when, choose);
  const curve = el('canvas', { role: 'img', 'aria-label': 'Output tokens over time' });
  const say = summary(curve);
  const frame = el('div', { class: 'glass-canvas' }, curve);
  const said = el('p', { class: 'glass-sentence' }, words || 'Output tokens over time; a vertical line is the moment shown.');
  const view = el('div', { class: 'glass-playback', tabindex: '-1' }, bar,
    el('div', { class: 'glass-lanes', 'data-lanes': `${lanes.length}` }, ...lanes.map((lane) => lane.root)),
    el('div', { class: 'glass-panel glass-curve' }, said, frame));
  root.append(view);
  lanes.forEach((lane) => lane.mount());

  slider.addEventListener('input', () => { pause(); go((Number(slider.value) / NOTCHES) * end); });
  choose.addEventListener('change', () => { speed = Number(choose.value); });
  view.addEventListener('keydown', (event) => {
    if (keyIsTaken(event)) return;
    if (event.target.tagName === 'CANVAS' && event.key !== ' ') return; // arrow keys walk over its cells
    const act = { ' ': () => toggle.click(), ArrowLeft: () => step(-1), ArrowRight: () => step(1) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  function go(to) {
    time = Math.min(end, Math.max(0, to));
    slider.value = `${Math.round((time / end) * NOTCHES)}`;
    lanes.forEach((lane) => lane.go(time));
    const step = lanes.length === 1 ? `step ${count(lanes[0].store.picture.step)} · ` : '';
    setText(when, `${step}${time.toFixed(2)} s of ${end.toFixed(2)} s`);
    slider.setAttribute('aria-valuetext', when.textContent);
    drawCurve();
  }

  function play() {
    if (time >= end) go(0);
    let last = performance.now();
    clearInterval(timer);
    timer = setInterval(() => {
      const now = performance.now();
      go(time + ((now - last) / 1000) * speed);
      last = now;
      if (time >= end || !view.isConnected) pause();
    }, TICK);
    setText(toggle, 'Pause');
  }

  /** Play from here; for those who want no motion, show the end. */
  function begin() {
    if (wantsCalm()) go(end);
    else play();
  }

  function rewind() {
    pause();
    go(0);
  }

  function pause() {
    clearInterval(timer);
    timer = 0;
    setText(toggle, 'Play');
  }

  /** To the next moment of any arm. */
  function step(way) {
    pause();
    const times = lanes.map((lane) => lane.neighbour(time, way)).filter((t) => t !== null);
    if (times.length) go(way > 0 ? Math.min(...times) : Math.max(...times));
  }

  function drawCurve() {
    const ink = inks();
    const width = frame.clientWidth;
    if (!width) return;
    const context = fitCanvas(curve, width, CURVE);
    context.clearRect(0, 0, width, CURVE);
    const [left, right, floor] = [46, 12, CURVE - 18];
    const most = Math.max(1, ...lanes.map((lane) => lane.totals[lane.totals.length - 1]?.tokens ?? 0));
    const x = (t) => left + (t / end) * (width - left - right);
    const y = (tokens) => floor - (tokens / most) * (floor - 8);
    context.font = `10.5px ${ink.font}`;
    context.fillStyle = ink.muted;
    context.textBaseline = 'middle';
    context.textAlign = 'right';
    context.fillText(count(most), left - 6, 8);
    context.fillText('0', left - 6, floor);
    context.textAlign = 'center';
    context.fillText('0 s', left, CURVE - 6);
    context.fillText(`${end.toFixed(1)} s`, width - right - 14, CURVE - 6);
    context.fillStyle = ink.line;
    context.fillRect(left, floor, width - left - right, 1);
    for (const lane of lanes) {
      const paint = ink[lane.mode] || ink.accent;
      for (const [until, alpha] of [[end, 0.25], [time, 1]]) {
        context.globalAlpha = alpha;
        context.strokeStyle = paint;
        context.lineWidth = 2;
        context.setLineDash(MODE_DASHES[lane.mode] ?? []);
        context.beginPath();
        context.moveTo(x(0), y(0));
        for (const { t, tokens } of lane.totals) if (t <= until) context.lineTo(x(t), y(tokens));
        context.stroke();
      }
      context.globalAlpha = 1;
      context.setLineDash([]);
      context.fillStyle = paint;
      context.fillRect(x(lane.end) - 0.5, 4, 1, floor - 4);
      context.fillStyle = ink.ink;
      context.textAlign = x(lane.end) > width / 2 ? 'right' : 'left';
      context.fillText(`${lane.title}: ${lane.end.toFixed(1)} s`, x(lane.end) + (x(lane.end) > width / 2 ? -5 : 5), 10 + 13 * lane.place);
    }
    context.fillStyle = ink.ink;
    context.fillRect(x(time) - 0.5, 2, 1, floor);
    say(`Output tokens at ${time.toFixed(1)} s: ${lanes.map((lane) => `${lane.title} ${lane.tokensAt(time)}`).join(', ')}`);
  }

  const forget = onThemeChange(() => { lanes.forEach((lane) => lane.store.changed()); drawCurve(); });
  const sizes = new ResizeObserver(() => { lanes.forEach((lane) => lane.store.changed()); drawCurve(); });
  sizes.observe(view);
  go(0);
  return {
    begin, rewind, view,
    close() {
      pause();
      forget();
      lanes.forEach((lane) => lane.close());
      sizes.disconnect();
      view.remove();
    },
  };
}

/** One run: its own store, led to a moment of the common clock. */
function makeLane({ title, frames, mode }, place, all) {
  const store = new Store(Infinity);
  frames.forEach((frame) => store.applyFrame(frame));
  const totals = frames.map(({ t, strip }) => ({ t, tokens: strip.all_tokens, done: strip.finished, wasted: strip.all_wasted }));
  store.link = { state: 'ready' };
  const end = totals.length ? totals[totals.length - 1].t : 0;
  const name = el('h3', {}, title);
  const words = el('span', { class: 'glass-figure' });
  const timeline = el('div', { class: 'glass-panel', 'data-panel': 'timeline' });
  const blocks = el('div', { class: 'glass-panel', 'data-panel': 'blocks' });
  const root = el('section', { class: 'glass-lane', 'aria-label': title }, el('div', { class: 'glass-heading' }, name, words));
  const strip = el('div');
  const anatomy = el('div', { class: 'glass-panel' });
  root.append(...(all ? [strip, timeline, blocks, anatomy] : [timeline, blocks]));
  const at = (time) => store.history.positionOfTime(time);
  return {
    title, mode, place, root, store, totals, end,
    close: () => {},
    mount() {
      this.close = mountTimeline(timeline, store);
      mountBlocks(blocks, store);
      if (all) {
        mountStrip(strip, store);
        mountAnatomy(anatomy, store);
      }
    },
    go(time) {
      const position = at(time);
      store.player.go(position);
      const { tokens, done: ended, wasted } = totals[position];
      const rate = time > 0 ? tokens / Math.min(Math.max(time, 1e-6), end || 1e-6) : 0;
      root.dataset.done = time >= end;
      setText(words, `${count(tokens)} tokens · ${figure(rate)} tok/s · ${count(wasted)} slot-steps wasted · `
        + (time >= end ? `finished at ${end.toFixed(1)} s` : `${ended} done`));
    },
    tokensAt: (time) => totals[at(time)].tokens,
    neighbour(time, way) {
      let position = at(time);
      if (way > 0) position += 1;
      else while (position >= 0 && totals[position].t >= time) position -= 1;
      return totals[position]?.t ?? null;
    },
  };
}
