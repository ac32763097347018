// What the engine looks like at one moment, built up from frames. Frames are described in `frames.py`.

const WINDOW = 1200; // steps kept for the timeline
const MAX_BINS = 600;
const FREE = { state: 'free', owners: [], index: -1, refs: 0, filled: 0, written: false };

export class Picture {
  constructor() {
    this.info = null;
    this.clear();
  }

  clear() {
    this.blocks = []; // {state, owners, index, refs, filled, written} by block number
    this.columns = []; // the timeline: {step, mode, waiting, reason, times, ended, cells: Map slot -> {key, tokens}}
    this.marks = []; // {step, slot, kind, key}
    this.slots = new Map(); // key -> {slot, key, prompt, computed, total, preemptions, cached}
    this.bins = []; // the throughput curve: [busy seconds, tokens per second, mode]
    this.strip = null;
    this.time = 0; // seconds
    this.version = 0; // grows with every frame
  }

  /** A copy that later frames leave alone. What the lists hold is never changed, so it can be shared. */
  clone() {
    const copy = new Picture();
    Object.assign(copy, this);
    copy.blocks = this.blocks.slice();
    copy.columns = this.columns.slice();
    copy.marks = this.marks.slice();
    copy.bins = this.bins.slice();
    return copy;
  }

  apply(frame) {
    if (frame.info) {
      const { version } = this;
      this.clear();
      this.version = version;
      this.info = frame.info;
      this.blocks = Array.from({ length: frame.info.num_blocks }, () => FREE);
    }
    this.version += 1;
    this.time = frame.t;
    for (const [step, mode, waiting, reason, times, flat, ended] of frame.steps) {
      const cells = new Map();
      for (let i = 0; i < flat.length; i += 3) cells.set(flat[i], { key: flat[i + 1], tokens: flat[i + 2] });
      this.columns.push({ step, mode, waiting, reason, times, ended, cells });
    }
    if (this.columns.length > WINDOW) this.columns.splice(0, this.columns.length - WINDOW);
    for (const [step, slot, kind, key] of frame.marks) this.marks.push({ step, slot, kind, key });
    const oldest = this.columns.length ? this.columns[0].step : 0;
    if (this.marks.length && this.marks[0].step < oldest) this.marks = this.marks.filter((mark) => mark.step >= oldest);
    for (const [block, state, owners, index, refs, filled, written] of frame.blocks) {
      const until = written ? this.version : 0; // written in this frame
      this.blocks[block] = { state, owners, index, refs, filled, written: until };
    }
    this.slots = new Map(frame.slots.map(([slot, key, prompt, computed, total, preemptions, cached]) => [
      key, { slot, key, prompt, computed, total, preemptions, cached },
    ]));
    if (frame.bins.length) {
      this.bins.push(...frame.bins);
      this.bins.splice(0, this.bins.length - MAX_BINS);
    }
    this.strip = frame.strip;
  }

  get step() {
    return this.strip?.step ?? 0;
  }

  /** The blocks of a request in the order of its block table: physical block numbers. */
  table(key) {
    const pieces = [];
    this.blocks.forEach((block, number) => {
      if (block.owners.includes(key)) pieces.push([block.index, number]);
    });
    return pieces.sort(([a], [b]) => a - b).map(([, number]) => number);
  }
}
