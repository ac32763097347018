// A dialog over the page. Escape closes it.

import { el } from './dom.js';

export function openDialog(title, onClose = () => {}) {
  const close = el('button', { type: 'button', class: 'glass-close', 'aria-label': 'Close' }, 'Close');
  const body = el('div', { class: 'glass-dialog-body' });
  const dialog = el('dialog', { class: 'glass-dialog', 'aria-label': title }, el('header', {}, el('h2', {}, title), close), body);
  close.addEventListener('click', () => dialog.close());
  dialog.addEventListener('close', () => {
    onClose();
    dialog.remove();
  });
  // Inside Gradio's page, whose style rules for small screens reach no further.
  (document.querySelector('.gradio-container .contain') ?? document.body).append(dialog);
  dialog.showModal();
  return { dialog, body };
}
