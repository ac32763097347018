// One tooltip for all pictures: lines of text next to the pointer, never outside the window.

import { el } from './dom.js';

const box = el('div', { class: 'glass-tooltip', role: 'tooltip', hidden: '' });

export function showTooltip(lines, x, y) {
  if (!box.isConnected) document.body.append(box);
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
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    show(at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  });
  canvas.addEventListener('pointerleave', leave);
  canvas.addEventListener('click', (event) => {
    const box = canvas.getBoundingClientRect();
    const found = at(event.clientX - box.left, event.clientY - box.top);
    store.pin(found?.key ?? null);
  });
  canvas.addEventListener('blur', leave);
  canvas.tabIndex = 0;
  canvas.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
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
    }
    return undefined;
  });
}
