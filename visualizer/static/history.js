// The frames that were seen, and the picture after any of them: a picture every so often, and frames from there.

import { Picture } from './picture.js';

const MOST = 4000; // frames kept; a frame is about one step
const EVERY = 50; // frames between two kept pictures

export class History {
  constructor(most = MOST) {
    this.most = most;
    this.clear();
  }

  clear() {
    this.frames = [];
    this.first = 0; // position of frames[0]; positions grow for ever, so that dropping the oldest moves none
    this.pictures = new Map(); // position -> the picture after that frame
    this.moments = []; // bookmarks: {position, kind}
  }

  get last() {
    return this.first + this.frames.length - 1;
  }

  /** Take in a frame and the picture after it, which is copied only when it is kept. */
  push(frame, picture) {
    this.frames.push(frame);
    const position = this.last;
    if (frame.info || position % EVERY === 0 || this.frames.length === 1) this.pictures.set(position, picture.clone());
    if (!frame.info) {
      const kinds = new Set(frame.marks.map((mark) => mark[2]));
      for (const kind of ['preempted', 'injected', 'prefix_hit']) {
        if (kinds.has(kind)) {
          this.moments.push({ position, kind });
          break;
        }
      }
    }
    if (this.frames.length >= this.most + EVERY) this.forget();
  }

  /** Drop the oldest frames, up to the next kept picture, from which what follows can be built. */
  forget() {
    const next = [...this.pictures.keys()].find((position) => position > this.first) ?? this.first;
    this.frames.splice(0, next - this.first);
    for (const position of this.pictures.keys()) if (position < next) this.pictures.delete(position);
    this.moments = this.moments.filter((moment) => moment.position >= next);
    this.first = next;
  }

  frame(position) {
    return this.frames[position - this.first];
  }

  /** The picture after the frame at a position. `from`, if it is one of an earlier position, is led on. */
  at(position, from = null) {
    let start = from && from.position <= position && from.position >= this.first ? from.position : -1;
    for (const kept of this.pictures.keys()) if (kept <= position && kept > start) start = kept;
    const picture = from?.position === start ? from.picture : this.pictures.get(start)?.clone() ?? new Picture();
    for (let i = Math.max(start + 1, this.first); i <= position; i += 1) picture.apply(this.frame(i));
    return picture;
  }

  /** The last position that is not after this time, in seconds. */
  positionOfTime(time) {
    let [low, high] = [this.first, this.last];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.frame(middle).t <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The nearest bookmark before (-1) or after (1) a position; null if there is none. */
  bookmark(position, way) {
    const found = way > 0 ? this.moments.find((moment) => moment.position > position)
      : this.moments.findLast((moment) => moment.position < position);
    return found ?? null;
  }
}
