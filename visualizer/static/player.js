// Which moment of a history is shown: the newest as it comes, or one that somebody travelled to.

export const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4];
const LONGEST_WAIT = 1; // seconds: pauses of the engine are played no longer than this

export class Player {
  constructor(store, history) {
    this.store = store;
    this.history = history;
    this.position = null; // null: follows the newest
    this.playing = false;
    this.speed = 1;
    this.timer = 0;
    this.shown = null; // {position, picture} travelled to
  }

  get live() {
    return this.position === null;
  }

  /** Where one is: the position shown, also when live. */
  get here() {
    return this.live ? this.history.last : this.position;
  }

  /** A frame came in, or old ones were dropped. */
  moved() {
    if (!this.live && this.position < this.history.first) this.go(this.history.first);
  }

  go(position) {
    const { first, last } = this.history;
    if (last < first) return;
    this.position = Math.min(last, Math.max(first, position));
    this.shown = { position: this.position, picture: this.history.at(this.position, this.shown) };
    this.store.show(this.shown.picture);
  }

  step(way) {
    this.pause();
    this.go(this.here + way);
  }

  bookmark(way) {
    this.pause();
    const found = this.history.bookmark(this.here, way);
    if (found) this.go(found.position);
    return found;
  }

  /** Stop here; the engine and whoever else watches go on. */
  pause() {
    clearTimeout(this.timer);
    this.playing = false;
    if (this.live) this.go(this.history.last);
    this.store.changed();
  }

  play() {
    if (this.live) return;
    this.playing = true;
    this.schedule();
    this.store.changed();
  }

  schedule() {
    clearTimeout(this.timer);
    const { history, position } = this;
    if (position >= history.last) {
      this.playing = false;
      this.store.changed();
      return;
    }
    const gap = Math.min(LONGEST_WAIT, Math.max(0, history.frame(position + 1).t - history.frame(position).t));
    // Faster than the eye, several moments are one picture.
    const moments = Math.max(1, Math.round(0.03 * this.speed / Math.max(gap, 1e-3)));
    this.timer = setTimeout(() => {
      this.go(position + moments);
      this.schedule();
    }, Math.max(30, (1000 * gap * moments) / this.speed));
  }

  setSpeed(speed) {
    this.speed = speed;
    if (this.playing) this.schedule();
  }

  /** Back to the newest, as it comes. */
  goLive() {
    clearTimeout(this.timer);
    this.playing = false;
    this.position = this.shown = null;
    this.store.show(null);
  }
}
