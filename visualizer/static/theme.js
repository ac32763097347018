// Colours and patterns. A slot's colour is one of eight hues (Okabe and Ito's, told apart by colour-blind
// eyes), full for slots A to H and pale for I to P; the letter says which one it is without colour.

const HUES = ['#e69f00', '#56b4e9', '#009e73', '#f0e442', '#0072b2', '#d55e00', '#cc79a7', '#8a8f98'];

export const MODES = ['naive', 'static', 'continuous'];
// What tells the modes apart without colour: a mark (Plotly's names) and the dashes of a line, in pixels.
export const MODE_SYMBOLS = { naive: 'circle', static: 'square', continuous: 'diamond' };
export const MODE_DASHES = { naive: [2, 3], static: [8, 4], continuous: [] };

const callbacks = new Set();
let dark = null;
let known = null; // inks of the present theme: reading CSS for every picture would cost more than drawing it

function watchTheme() {
  const observer = new MutationObserver(() => {
    dark = known = null;
    callbacks.forEach((callback) => callback());
  });
  for (const node of [document.documentElement, document.body]) {
    observer.observe(node, { attributes: true, attributeFilter: ['class'] });
  }
}

watchTheme();

/** Call back when Gradio switches between light and dark. Returns what ends that. */
export function onThemeChange(callback) {
  callbacks.add(callback);
  return () => callbacks.delete(callback);
}

function isDark() {
  dark ??= [document.body, document.documentElement].some((node) => node.classList.contains('dark'));
  return dark;
}

/** The page's own CSS variables, as canvas needs them; the same object until the theme changes. */
export function inks() {
  known ??= readInks();
  return known;
}

function readInks() {
  const style = getComputedStyle(document.body);
  const read = (name) => style.getPropertyValue(`--glass-${name}`).trim();
  return {
    ink: read('ink'), muted: read('muted'), line: read('line'), panel: read('panel'), edge: read('edge'),
    accent: read('accent'), alarm: read('alarm'), idle: read('idle'), hatch: read('hatch'), font: read('font'),
    naive: read('naive'), static: read('static'), continuous: read('continuous'),
    forward: read('forward'), prepare: read('prepare'), sample: read('sample'), schedule: read('schedule'),
    postprocess: read('postprocess'),
  };
}

function mix(from, to, share) {
  const part = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  const channels = [0, 1, 2].map((i) => Math.round(part(from, i) * (1 - share) + part(to, i) * share));
  return `#${channels.map((value) => value.toString(16).padStart(2, '0')).join('')}`;
}

function luminance(hex) {
  const linear = [0, 1, 2].map((i) => {
    const value = parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

const looks = new Map();

/** How a slot looks: fill, a darker (or, in the dark, lighter) edge of 3:1 contrast, text on the fill. */
export function slotLook(slot) {
  const night = isDark();
  const id = `${slot} ${night}`;
  if (!looks.has(id)) {
    const hue = HUES[slot % 8];
    const pale = Math.floor(slot / 8) % 2 === 1;
    const fill = pale ? mix(hue, night ? '#12151b' : '#ffffff', night ? 0.42 : 0.45) : hue;
    const text = luminance(fill) > 0.22 ? '#11151c' : '#ffffff';
    looks.set(id, { fill, edge: mix(hue, night ? '#ffffff' : '#000000', night ? 0.3 : 0.4), text });
  }
  return looks.get(id);
}

export const nobody = { fill: '#9aa0a9', edge: '#7b828c', text: '#11151c' };

/** A to Z, then AA to AZ, BA to BZ: no two slots have the same. */
export function slotLetter(slot) {
  if (slot === null || slot === undefined) return '–';
  return (slot < 26 ? '' : slotLetter(Math.floor(slot / 26) - 1)) + String.fromCharCode(65 + (slot % 26));
}

const tiles = new Map();

/** A diagonal hatch as a canvas pattern, sharp at the screen's own resolution. */
export function hatch(context, colour, spacing = 5, width = 1.4) {
  const ratio = window.devicePixelRatio || 1;
  const id = `${colour} ${spacing} ${width} ${ratio}`;
  if (!tiles.has(id)) {
    const size = Math.max(2, Math.round(spacing * ratio));
    const tile = document.createElement('canvas');
    tile.width = tile.height = size;
    const pen = tile.getContext('2d');
    pen.strokeStyle = colour;
    pen.lineWidth = width * ratio;
    pen.beginPath();
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 2, size + 2);
      pen.lineTo(shift + size + 2, -2);
    }
    pen.stroke();
    tiles.set(id, tile);
  }
  const pattern = context.createPattern(tiles.get(id), 'repeat');
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
