// The visitor's own requests: a card each, with its answer as it comes.

import { el, figure, setText } from './dom.js';
import { slotLetter, slotLook } from './theme.js';
import { reasonWords } from './timeline.js';

const plain = { fill: 'var(--glass-line)', edge: 'var(--glass-edge)', text: 'var(--glass-muted)' }; // without a slot
const SIGNS = { abort: '■', error: '!', lost: '!' };
const ENDS = { stop: 'done', length: 'done', abort: 'stopped', error: 'failed', lost: 'lost with the server' };

export function mountAnswersHead(root) {
  root.append(el('h2', {}, 'Your requests'), el('p', { class: 'glass-sentence' }, 'Only you see your text. Everyone sees the slots.'));
}

export function mountCards(root, store, feed) {
  const empty = el('p', { class: 'glass-empty' });
  const list = el('div', { class: 'glass-cards' });
  root.append(empty, list);
  const nodes = new Map();
  document.getElementById('glass-clear').addEventListener('click', () => store.clearPast());
  // While the pointer is on the cards they keep their places: none slips away from its reader.
  const reading = () => list.matches(':hover') && matchMedia('(hover: hover)').matches;

  store.onChange(() => {
    setText(empty, emptyWords(store));
    empty.hidden = store.cards.size > 0;
    for (const [number, node] of nodes) {
      if (store.cards.get(number) !== node.card) {
        node.root.remove();
        nodes.delete(number);
      }
    }
    for (const card of store.cards.values()) {
      if (!nodes.has(card.number)) {
        const node = makeCard(card, store, feed);
        nodes.set(card.number, node);
        list.append(node.root);
      }
      const node = nodes.get(card.number);
      updateCard(node, card, store);
      const order = `${rank(card)}`;
      if (node.root.style.order !== order && !(node.root.style.order && reading())) node.root.style.order = order;
    }
  });
}

function emptyWords(store) {
  if (store.link.state === 'loading') return 'The model is being loaded.';
  if (store.link.state === 'failed') return 'There is no engine to answer.';
  return 'Nothing asked yet. Type a prompt and press Enter, or press “8 examples”. While they are answered, send another '
    + 'and watch it being injected.';
}

/** The order of cards: the running ones by slot, as in the timeline, then the finished, then the queue. */
function rank(card) {
  if (card.state === 'waiting') return 1e6 + card.number;
  if (card.past) return 2e6;
  if (card.state === 'finished') return 1e5 - card.number;
  return card.slot ?? 0;
}

function makeCard(card, store, feed) {
  const badge = el('span', { class: 'glass-badge', 'aria-hidden': 'true' });
  const state = el('b');
  const details = el('span', { class: 'glass-details' });
  const stop = el('button', { type: 'button', class: 'glass-stop' }, 'stop');
  stop.setAttribute('aria-label', `Stop: ${card.prompt.slice(0, 60)}`);
  stop.addEventListener('click', () => {
    stop.disabled = true;
    feed.stop(card.number).catch(() => { stop.disabled = false; });
  });
  const way = el('div', { class: 'glass-way' });
  const answer = el('div', { class: 'glass-answer', dir: 'auto' });
  const root = el('article', { class: 'glass-card', tabindex: '0' },
    el('header', {}, badge, state, details, stop), way,
    el('div', { class: 'glass-asked', dir: 'auto', title: card.prompt.slice(0, 2000) }, card.prompt), answer);
  // Each engine numbers its requests by itself: those of the other are not in this picture.
  const key = () => (card.where === feed.source && card.key) || null;
  const isolate = () => store.isolate(key());
  root.addEventListener('pointerenter', isolate);
  root.addEventListener('focusin', isolate);
  root.addEventListener('pointerleave', () => store.isolate(null));
  root.addEventListener('click', (event) => {
    if (!event.target.closest('button') && getSelection().isCollapsed && key()) store.pin(key());
  });
  root.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && event.target === root && key()) store.pin(key());
    if (event.key === 'Escape') store.pin(null);
  });
  root.addEventListener('focusout', () => store.isolate(null));
  return { card, key, look: null, root, badge, state, details, stop, way, answer };
}

function updateCard(node, card, store) {
  const slot = card.slot ?? null;
  const look = slot === null ? plain : slotLook(slot);
  if (node.look !== look) { // only what changed: every style that is set costs a layout
    node.look = look;
    node.root.style.setProperty('--slot', look.fill);
    node.root.style.setProperty('--slot-edge', look.edge);
    node.root.style.setProperty('--slot-text', look.text);
  }
  if (node.root.dataset.state !== card.state) node.root.dataset.state = card.state;
  node.root.classList.toggle('glass-isolated', store.isolated !== null && store.isolated === node.key());
  setText(node.badge, card.state === 'finished' ? (SIGNS[card.finish] || '✓') : slotLetter(slot));
  setText(node.state, stateWords(card));
  setText(node.details, detailWords(card));
  setText(node.way, wayWords(card, store.newest.strip?.mode));
  node.stop.hidden = card.state === 'finished';
  setText(node.answer, card.text + (card.error ? `\n${card.error}` : ''));
}

function stateWords(card) {
  switch (card.state) {
    case 'waiting': return card.preemptions && card.num_output ? 'preempted, waiting' : 'waiting';
    case 'prefill': return `prefill ${card.num_computed} / ${card.num_total}`;
    case 'decode': return 'decode';
    default: return ENDS[card.finish] || 'done';
  }
}

/** The numbers beside the state. */
function detailWords(card) {
  const words = card.where === 'sandbox' ? ['sandbox'] : [];
  if (card.key) words.push(`#${card.key}`);
  if (card.state === 'waiting') {
    if (card.place) words.push(card.place === 1 ? 'next in line' : `${ordinal(card.place)} in line`);
  } else {
    if (card.num_output) words.push(`${card.num_output} token${card.num_output > 1 ? 's' : ''}`);
    if (card.rate) words.push(`${figure(card.rate)} tok/s`);
  }
  return words.join(' · ');
}

/** What is notable on its way: why it waits, how it came in, what happened to it, how it ended. */
function wayWords(card, mode) {
  const words = [];
  if (card.state === 'waiting' && card.place === 1 && card.reason) words.push(reasonWords(card.reason, mode));
  if (card.injected) words.push(`▼ injected at step ${card.start_step}`);
  if (card.preemptions) words.push(`▲ preempted ${card.preemptions === 1 ? 'once' : `${card.preemptions} times`}`);
  if (card.finish === 'length') words.push('ended at its length limit');
  return words.join(' · ');
}

function ordinal(n) {
  const tail = n % 100 > 10 && n % 100 < 14 ? 'th' : ['th', 'st', 'nd', 'rd'][n % 10] || 'th';
  return `${n}${tail}`;
}
