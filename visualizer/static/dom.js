// Small helpers for the page's DOM, canvases and numbers.

/** Create an element: el('p', {class: 'x', title: 'y'}, 'text', child, ...). Text is never parsed. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A button with words or a sign on it. The title says what it does, and is the name of one with a sign. */
export function button(words, title, act) {
  const node = el('button', { type: 'button', title }, words);
  if (!/[a-z]/i.test(words)) node.setAttribute('aria-label', title);
  node.addEventListener('click', act);
  return node;
}

/** Whether the visitor asked for as little motion as can be. */
export function wantsCalm() {
  return matchMedia('(prefers-reduced-motion: reduce)').matches;
}

/** A panel's heading: its title, the sentence that says what it shows, and a place for a figure. */
export function heading(title, sentence) {
  const figure = el('span', { class: 'glass-figure' });
  const head = el('div', { class: 'glass-heading' }, el('h2', {}, title), figure);
  return { head: [head, el('p', { class: 'glass-sentence' }, sentence)], figure };
}

/** A legend entry: a swatch that `paint(context, width, height)` draws, and words. */
export function legend(entries) {
  const list = el('ul', { class: 'glass-legend' });
  const swatches = entries.map(([words, paint]) => {
    const canvas = el('canvas', { 'aria-hidden': 'true' });
    const text = el('span', {}, words);
    list.append(el('li', {}, canvas, text));
    return { canvas, paint, text };
  });
  let drawn = null;
  /** Draw the swatches if the theme's inks are not those of the last time. */
  const draw = (inks) => {
    if (inks === drawn) return;
    drawn = inks;
    swatches.forEach(({ canvas, paint }) => {
      const context = fitCanvas(canvas, 14, 14);
      context.clearRect(0, 0, 14, 14);
      paint(context, 14, 14);
    });
  };
  return { list, draw, texts: swatches.map((swatch) => swatch.text) };
}

/** Size a canvas to CSS pixels at the screen's own sharpness; its context draws in CSS pixels. */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.round(width * ratio);
  const h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Set text only if it changed, so that screen readers and selections are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** 12345 -> "12 345" with thin spaces. */
export function count(number) {
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, '\u2009');
}

/** A figure of two or three digits: 0.31, 4.2, 38, 412. */
export function figure(number) {
  if (number >= 100) return count(number);
  if (number >= 10) return number.toFixed(number >= 20 ? 0 : 1);
  return number.toFixed(number >= 1 ? 1 : 2);
}

/** A `draw` that rests while its panel is out of sight, and catches up when it comes into view. */
export function whileInSight(panel, store, draw) {
  let inSight = true;
  let sized = false; // the first picture is drawn in any case: it gives the panel its height
  new IntersectionObserver((entries) => {
    inSight = entries.at(-1).isIntersecting; // a busy page is told of leaving and coming back at once
    if (inSight) draw();
  }, { rootMargin: '200px' }).observe(panel);
  return () => {
    if (!inSight && sized) return;
    draw();
    sized = store.info !== null;
  };
}

/** Say what a picture shows, at most every five seconds, for those who cannot see it. */
export function summary(node) {
  let latest = '';
  let timer = 0;
  const say = () => {
    timer = 0;
    if (node.getAttribute('aria-label') === latest) return;
    node.setAttribute('aria-label', latest);
    timer = setTimeout(say, 5000); // what comes until then is said then, the last of it
  };
  return (text) => {
    latest = text;
    if (!timer) say();
  };
}

const TAKES_ALL_KEYS = 'textarea, select, [contenteditable], [role=dialog], input:not([type=range])';
const RANGE_KEYS = ['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Home', 'End', 'PageUp', 'PageDown'];

/** Whether a key belongs to the control that has the focus, and is no command to the page around it. */
export function keyIsTaken({ target, key }) {
  if (target.closest?.(TAKES_ALL_KEYS)) return true;
  if (target.closest?.('input[type=range]')) return RANGE_KEYS.includes(key);
  return Boolean(target.closest?.('button')) && [' ', 'Enter'].includes(key);
}
