// What the page knows: the engine as it is, the moment that is shown, and the visitor's own cards.

import { History } from './history.js';
import { Picture } from './picture.js';
import { Player } from './player.js';

export class Store {
  /** most: how many moments are remembered; a recording is kept whole. */
  constructor(most = undefined) {
    this.newest = new Picture(); // the engine as the last frame left it
    this.picture = this.newest; // what the panels show: the newest, or a moment travelled to
    this.isRecording = most === Infinity;
    this.history = new History(most);
    this.player = new Player(this, this.history);
    this.cards = new Map(); // the visitor's own requests: number -> card
    this.past = 0; // cards of servers that are gone, which keep their text
    this.link = { state: 'connecting' }; // connecting | loading | failed | ready | lost
    this.pinned = null; // key of the request that a click brought out
    this.pointed = null; // the same, of the one under the pointer
    this.listeners = new Set();
    this.scheduled = false;
  }

  // What panels read, at the moment that is shown.
  get info() { return this.picture.info; }

  get blocks() { return this.picture.blocks; }

  get columns() { return this.picture.columns; }

  get marks() { return this.picture.marks; }

  get bins() { return this.picture.bins; }

  get strip() { return this.picture.strip; }

  get version() { return this.picture.version; }

  /** Draw soon: all listeners, once, before the browser's next frame. */
  changed() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.listeners.forEach((listener) => listener(this));
    });
  }

  onChange(listener) {
    this.listeners.add(listener);
  }

  /** The request that all panels bring out: the one under the pointer, or the one that was clicked. */
  get isolated() {
    return this.pointed ?? this.pinned;
  }

  /** Bring out one request in all panels while it is pointed at, or none (null). */
  isolate(key) {
    if (this.pointed === key) return;
    this.pointed = key;
    this.changed();
  }

  /** Bring out one request until it is clicked again, or none (null). */
  pin(key) {
    const next = key === this.pinned ? null : key;
    if (next === this.pinned) return;
    this.pinned = next;
    this.changed();
  }

  applyFrame(frame) {
    this.newest.apply(frame);
    this.history.push(frame, this.newest);
    this.player.moved();
  }

  /** Frames of something else will come (another engine): what was seen so far does not lead on to them. */
  startOver() {
    this.player.goLive();
    this.newest = new Picture();
    this.history.clear();
    this.pinned = this.pointed = null;
    this.show(null);
  }

  /** Show a moment; null for the newest, as it comes. */
  show(picture) {
    this.picture = picture ?? this.newest;
    this.changed();
  }

  /** Take up what a poll said about the visitor's own cards. */
  applyOwn(own) {
    const present = new Set(own.numbers);
    for (const [number, card] of this.cards) if (!card.past && !present.has(number)) this.cards.delete(number);
    for (const { number, from, more, end, stamp, prompt, told } of own.cards) {
      const card = this.cards.get(number) || { number, prompt, text: '' };
      card.text = from === 0 ? more : card.text + more;
      Object.assign(card, told, { end, stamp });
      this.cards.set(number, card);
    }
  }

  /** The server that answered these cards is gone: what they have stays to be read, and nothing more comes. */
  keepAsPast() {
    const cards = [...this.cards.values()];
    this.cards.clear();
    this.addPast(cards);
  }

  addPast(cards) {
    for (const card of cards) {
      if (card.state !== 'finished') Object.assign(card, { state: 'finished', finish: 'lost' });
      this.past += 1;
      this.cards.set(`past ${this.past}`, Object.assign(card, { past: true, key: null, number: `past ${this.past}` }));
    }
  }

  clearPast() {
    for (const [number, card] of this.cards) if (card.past) this.cards.delete(number);
    this.changed();
  }

  /** What the page holds of each card already, as a poll tells it: characters of its answer, stamp of its state. */
  have() {
    return Object.fromEntries([...this.cards.values()].filter((card) => !card.past).map((card) => [card.number, [card.end, card.stamp]]));
  }

  slotOf(key) {
    return this.picture.slots.get(key)?.slot ?? null;
  }

  get busy() {
    const { strip } = this.newest;
    return Boolean(strip && (strip.running || strip.waiting));
  }
}
