// What a tab remembers when its page is loaded again: Gradio does so by itself once a server is back.

const KEY = 'glass-engine';
const MAX_CHARS = 1_000_000; // browsers give a tab about five million

/** Keep answers and what was not sent in this tab, and show them again after a reload. */
export function rememberOverReloads(store, box, giveBack) {
  const { cards = [], unsent = '' } = read();
  store.addPast(cards);
  if (unsent) giveBack(unsent);
  addEventListener('pagehide', () => {
    const waiting = (window.glassSent || []).map((sent) => sent.text);
    const kept = { cards: [...store.cards.values()], unsent: box().value || waiting.pop() || '' };
    let text = JSON.stringify(kept);
    while (text.length > MAX_CHARS && kept.cards.length) {
      kept.cards.splice(0, Math.ceil(kept.cards.length / 2)); // the oldest go first
      text = JSON.stringify(kept);
    }
    try {
      sessionStorage.setItem(KEY, text);
    } catch { /* full, or forbidden: then the tab forgets */ }
  });
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) || {};
  } catch {
    return {};
  }
}
