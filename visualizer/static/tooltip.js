// One tooltip for all pictures: lines of text next to the pointer, never outside the window; and said, at a key.

import { el } from './dom.js';

const box = el('div', { class: 'glass-tooltip', 'aria-hidden': 'true', hidden: '' });
const voice = el('div', { class: 'glass-unseen', role: 'status' });

/** Bring a node where it is seen and heard: an open dialog lies above all else, and silences it. */
function surface(node) {
  const place = document.querySelector('dialog[open]') ?? document.body;
  if (node.parentNode !== place) place.append(node);
}

export function showTooltip(lines, x, y) {
  surface(box);
  box.replaceChildren(...lines.map((line, i) => el(i ? 'div' : 'strong', {}, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(x + 14, window.innerWidth - width - 8);
  const top = y + 18 + height > window.innerHeight ? y - height - 10 : y + 18;
  box.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
}

export function hideTooltip() {
  box.hidden = true;
}

/**
 * Make a canvas answer to pointer and keyboard. `at(x, y)` finds what lies there: {key, lines} or null.
 * `walk(step)`, for the arrow keys, moves a cursor and returns {key, lines, x, y}. A click, or Enter, brings out
 * a request in all panels until the next click, or Escape.
 */
export function explorable(canvas, store, at, walk) {
  const show = (found, x, y) => {
    store.isolate(found?.key || null);
    if (found) showTooltip(found.lines, x, y);
    else hideTooltip();
  };
  const leave = () => show(null);
  const follow = (event) => {
    const box = canvas.getBoundingClientRect();
    show(at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  };
  canvas.addEventListener('pointermove', follow);
  canvas.addEventListener('pointerdown', follow);
  // A finger leaves when it is lifted: what a tap showed stays until the next one elsewhere, or a scroll.
  canvas.addEventListener('pointerleave', (event) => event.pointerType !== 'touch' && leave());
  canvas.addEventListener('pointercancel', leave);
  canvas.addEventListener('click', (event) => {
    const box = canvas.getBoundingClientRect();
    const found = at(event.clientX - box.left, event.clientY - box.top);
    store.pin(found?.key ?? null);
  });
  canvas.addEventListener('blur', leave);
  canvas.addEventListener('focus', () => surface(voice)); // readers must know it before it speaks
  canvas.tabIndex = 0;
  canvas.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      if (!box.hidden || store.pinned !== null) event.preventDefault(); // it leaves the cell, and not a dialog
      store.pin(null);
      return leave();
    }
    if (event.key === 'Enter' && store.pointed !== null) return store.pin(store.pointed);
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return undefined;
    event.preventDefault();
    const found = walk(step);
    if (found) {
      const box = canvas.getBoundingClientRect();
      show(found, box.left + found.x, box.top + found.y);
      voice.textContent = found.lines.join(', ');
    }
    return undefined;
  });
}
