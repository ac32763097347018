// The page's start: mount the panels, start the feed, pass on what Python says.

import { mountAnatomy } from './anatomy.js';
import { mountBlocks } from './blocks.js';
import { mountAnswersHead, mountCards } from './cards.js';
import { el, setText } from './dom.js';
import { Feed } from './feed.js';
import { rememberOverReloads } from './memory.js';
import { mountLab } from './lab.js';
import { mountHeader, mountLive, mountStrip } from './metrics.js';
import { Store } from './store.js';
import { onThemeChange } from './theme.js';
import { mountThroughput } from './throughput.js';
import { mountTimeline } from './timeline.js';
import { mountTransport } from './transport.js';

const NOTICE_MS = 12000;
const ANSWER_MS = 8000; // a prompt that the server has not taken by then goes back into its box

const PLACES = ['header', 'live', 'strip', 'transport', 'lab', 'sandbox', 'timeline', 'blocks', 'answers-head', 'cards',
  'throughput', 'anatomy', 'notice', 'mode', 'clear', 'prompt'];

/** Start the page. Returns what takes the values that Python sends: {token, notice, refused, took}. */
export async function start(hub, links) {
  // Gradio mounts its components one after the other, and on a busy machine slowly.
  while (!PLACES.every((name) => document.getElementById(`glass-${name}`)) || !promptBox()) {
    await new Promise((resolve) => { setTimeout(resolve, 20); });
  }
  const store = new Store();
  window.glassStore = store; // for whoever looks under the hood from the browser's console
  const feed = new Feed(store, links, hub);
  const place = (name) => document.getElementById(`glass-${name}`);
  mountHeader(place('header'), store);
  mountLive(place('live'), store, feed);
  mountStrip(place('strip'), store);
  mountTransport(place('transport'), store);
  mountLab(place('lab'), place('sandbox'), store, feed);
  mountTimeline(place('timeline'), store);
  mountBlocks(place('blocks'), store);
  mountAnswersHead(place('answers-head'));
  mountCards(place('cards'), store, feed);
  mountThroughput(place('throughput'), store, links);
  mountAnatomy(place('anatomy'), store);
  mountBanner(place('strip'), store);
  followMode(store, links, feed);
  onThemeChange(() => store.changed());
  new ResizeObserver(() => store.changed()).observe(place('timeline'));
  rememberOverReloads(store, promptBox, giveBack);
  store.changed();
  feed.poll();

  let clearing = 0;
  const say = (notice) => {
    const box = place('notice');
    setText(box, notice);
    clearTimeout(clearing);
    if (notice) clearing = setTimeout(() => setText(box, ''), NOTICE_MS);
  };
  store.onChange(() => {
    const [oldest] = window.glassSent || [];
    if (!oldest || performance.now() - oldest.at < ANSWER_MS) return;
    window.glassSent.shift();
    giveBack(oldest.text);
    say('The server did not answer, so this prompt was not sent. Please send it again.');
  });
  return ({ token, notice, refused, took }) => {
    if (took) window.glassSent?.shift();
    feed.setToken(token);
    if (refused) giveBack(refused);
    say(notice || '');
    feed.soon();
  };
}

function promptBox() {
  return document.querySelector('#glass-prompt textarea');
}

/** Put a refused prompt back into its box, unless the visitor is typing the next one already. */
function giveBack(text) {
  const box = promptBox();
  if (box.value) return;
  box.value = text;
  box.dispatchEvent(new Event('input', { bubbles: true }));
}

/** A banner over the panels while there is nothing live to show: loading, failed, or out of touch. */
function mountBanner(before, store) {
  const words = el('span');
  const bar = el('progress', { max: '1' });
  const banner = el('div', { class: 'glass-banner', role: 'status' }, words, bar);
  before.parentElement.insertBefore(banner, before);
  store.onChange(() => {
    const { state, stage, fraction, error } = store.link;
    banner.hidden = state === 'ready' || state === 'connecting';
    banner.dataset.state = state;
    bar.hidden = state !== 'loading';
    if (state === 'loading') {
      setText(words, `Loading the model: ${stage}`);
      bar.value = fraction;
    } else if (state === 'failed') {
      setText(words, `There is no engine to answer: ${error.replace(/[\s.]*$/, '')}. Once that is mended, start the server again.`);
    } else if (state === 'lost') {
      setText(words, 'The server does not answer. What you see is the last known state; this page goes on by itself.');
    }
  });
}

/** Another visitor may change the mode: let the toggle follow the engine, but not fight a click just made. */
function followMode(store, links, feed) {
  let clicked = 0;
  let asked = 0;
  document.getElementById('glass-mode').addEventListener('input', () => { clicked = performance.now(); });
  store.onChange(() => {
    const mode = store.newest.strip?.mode;
    const shown = document.querySelector('#glass-mode input:checked')?.value;
    const now = performance.now();
    if (feed.source !== 'live' || !mode || mode === shown || now - clicked < 1500 || now - asked < 500) return;
    asked = now;
    window.glassMode = mode;
    links.follow();
  });
}
