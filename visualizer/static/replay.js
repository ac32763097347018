// The page of one recorded run: unpack the frames that it carries, and play them.

import { el } from './dom.js';
import { mountPlayback } from './playback.js';

export async function start() {
  document.body.classList.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches);
  document.getElementById('theme').addEventListener('click', () => document.body.classList.toggle('dark'));
  const root = document.getElementById('replay');
  try {
    const arms = await unpack(JSON.parse(document.getElementById('recording').textContent).gzip);
    const playback = mountPlayback(root, arms, '', arms.length === 1);
    playback.view.focus();
    playback.begin();
  } catch (error) {
    root.append(el('p', { class: 'glass-banner', role: 'alert' }, `This recording cannot be shown: ${error.message}`));
  }
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}
