// The bar of time: pause, step, scrub, play again, and back to live. It moves the picture, never the engine.

import { button, count, el, keyIsTaken, setText } from './dom.js';
import { SPEEDS } from './player.js';

const KINDS = { preempted: 'a preemption', injected: 'an injection', prefix_hit: 'a prefix hit' };

export function mountTransport(root, store) {
  const { player, history } = store;
  const back = button('«', 'Previous injection, preemption or prefix hit', () => jump(-1));
  const earlier = button('‹', 'One step back (←)', () => player.step(-1));
  const toggle = button('Pause', 'Pause the picture, or play it on (Space)', () => (player.live || player.playing ? player.pause() : player.play()));
  const later = button('›', 'One step on (→)', () => player.step(1));
  const next = button('»', 'Next injection, preemption or prefix hit', () => jump(1));
  const slider = el('input', { type: 'range', 'aria-label': 'Moment shown' });
  const speed = el('select', { 'aria-label': 'Speed of playing' },
    ...SPEEDS.map((times) => el('option', { value: `${times}` }, `${times}×`)));
  speed.value = '1';
  const words = el('span', { class: 'glass-when' });
  const live = button('Live', 'Follow the engine as it works (L)', () => player.goLive());
  live.className = 'glass-live';
  const bar = el('div', { class: 'glass-transport', role: 'group', 'aria-label': 'Time' },
    el('div', { class: 'glass-transport-buttons' }, back, earlier, toggle, later, next), slider, words, speed, live);
  root.append(bar);

  slider.addEventListener('input', () => {
    player.pause();
    player.go(Number(slider.value));
  });
  speed.addEventListener('change', () => player.setSpeed(Number(speed.value)));
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape') { // whatever has the focus: the card that was clicked may be gone
      store.pin(null);
      store.isolate(null);
      return;
    }
    if (keyIsTaken(event)) return;
    const act = { ' ': () => toggle.click(), l: () => player.goLive() }[event.key.toLowerCase()]
      // Arrow keys on a picture walk over its cells.
      ?? (event.target.tagName !== 'CANVAS' && { ArrowLeft: () => player.step(-1), ArrowRight: () => player.step(1) }[event.key]);
    if (!act || !history.frames.length) return;
    event.preventDefault();
    act();
  });

  function jump(way) {
    const found = player.bookmark(way);
    if (found) said = `at ${KINDS[found.kind]}`;
    else said = way > 0 ? 'no later one' : 'no earlier one';
    store.changed();
  }

  let said = '';
  let at = null;
  store.onChange(() => {
    const some = history.frames.length > 1;
    for (const node of [back, earlier, toggle, next, slider]) node.disabled = !some;
    later.disabled = !some || player.here >= history.last;
    bar.dataset.live = player.live;
    live.disabled = player.live;
    setText(toggle, player.live || player.playing ? 'Pause' : 'Play');
    if (document.activeElement !== slider || player.live || player.playing) {
      slider.min = history.first;
      slider.max = history.last;
      slider.value = player.here;
    }
    if (at !== player.position) {
      if (at !== null && !store.history.moments.some((moment) => moment.position === player.position)) said = '';
      at = player.position;
    }
    setText(words, when());
    slider.setAttribute('aria-valuetext', words.textContent || 'live');
  });

  function when() {
    if (!store.strip) return '';
    const newest = store.newest.step;
    if (player.live) return `step ${count(newest)}`;
    const ago = store.newest.time - store.picture.time;
    return `step ${count(store.picture.step)} of ${count(newest)} · ${span(ago)} ago${said ? ` · ${said}` : ''}`;
  }
}

/** 3.2 s, 48 s, 2 min 05 s. */
function span(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, '0')} s`;
}
