// What the page knows: the engine's visible state, rebuilt from frames, and the visitor's own cards.

const WINDOW = 300; // steps kept for the timeline
const MAX_BINS = 600;

export class Store {
  constructor() {
    this.info = null;
    this.reset();
    this.cards = new Map(); // the visitor's own requests: number -> card
    this.past = 0; // cards of servers that are gone, which keep their text
    this.link = { state: 'connecting' }; // connecting | loading | failed | ready | lost
    this.isolated = null; // key of the request that all panels bring out
    this.listeners = new Set();
    this.scheduled = false;
  }

  reset() {
    this.blocks = []; // {state, owners, index, refs, filled, written} by block number
    this.columns = []; // the timeline: {step, mode, waiting, reason, times, cells: Map slot -> {key, tokens}}
    this.marks = []; // {step, slot, kind, key}
    this.slots = new Map(); // key -> {slot, key, prompt, computed, total, preemptions, cached}
    this.bins = []; // the throughput curve: [busy seconds, tokens per second, mode]
    this.strip = null;
    this.version = 0; // grows with every frame
  }

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

  /** Bring out one request in all panels, or none (null). */
  isolate(key) {
    if (this.isolated === key) return;
    this.isolated = key;
    this.changed();
  }

  applyFrame(frame) {
    if (frame.info) {
      this.reset();
      this.info = frame.info;
      const free = { state: 'free', owners: [], index: -1, refs: 0, filled: 0, written: false };
      this.blocks = Array.from({ length: frame.info.num_blocks }, () => free);
    }
    this.version += 1;
    for (const [step, mode, waiting, reason, times, flat] of frame.steps) {
      const cells = new Map();
      for (let i = 0; i < flat.length; i += 3) cells.set(flat[i], { key: flat[i + 1], tokens: flat[i + 2] });
      this.columns.push({ step, mode, waiting, reason, times, cells });
    }
    this.columns.splice(0, this.columns.length - WINDOW);
    for (const [step, slot, kind, key] of frame.marks) this.marks.push({ step, slot, kind, key });
    const oldest = this.columns.length ? this.columns[0].step : 0;
    this.marks = this.marks.filter((mark) => mark.step >= oldest);
    for (const [block, state, owners, index, refs, filled, written] of frame.blocks) {
      const until = written ? this.version : 0; // written in this frame
      this.blocks[block] = { state, owners, index, refs, filled, written: until };
    }
    this.slots = new Map(frame.slots.map(([slot, key, prompt, computed, total, preemptions, cached]) => [
      key, { slot, key, prompt, computed, total, preemptions, cached },
    ]));
    this.bins.push(...frame.bins);
    this.bins.splice(0, this.bins.length - MAX_BINS);
    this.strip = frame.strip;
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
      Object.assign(card, { past: true, key: null });
      this.past += 1;
      this.cards.set(`past ${this.past}`, Object.assign(card, { number: `past ${this.past}` }));
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
    return this.slots.get(key)?.slot ?? null;
  }

  get busy() {
    return Boolean(this.strip && (this.strip.running || this.strip.waiting));
  }
}
