// SPDX-License-Identifier: Apache-2.0
//
// The selected head and step, and helpers that make parts of the document.

// ---- the selection, which is also kept in the address so that a view can be shared

// Finds the initial selection: the head and the new token with the most attention to a far row.
function farthestLook() {
  let best = {head: 0, step: lastStep, score: 0};
  for (const head of heads) {
    head.reads.forEach(({rows, levels}, step) => {
      if (steps[step].kind === 'prompt') return;
      for (let i = 0; i < rows.length; ++i) {
        const back = steps[step].tokens - 1 - rows[i];
        const score = rows[i] < 16 || back < 64 ? 0 : shareOf(levels[i]);
        if (score > best.score) best = {head: head.index, step, score};
      }
    });
  }
  return best;
}
const chosen = farthestLook();
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const number = (name, end) => {
    const value = Number.parseInt(wanted.get(name), 10);
    return value >= 0 && value < end ? value : null;
  };
  const layer = number('layer', about.layers);
  const kvHead = number('head', about.kvHeads);
  if (layer !== null && kvHead !== null) chosen.head = layer * about.kvHeads + kvHead;
  chosen.step = number('step', steps.length) ?? chosen.step;
}
function writeAddress() {
  const head = heads[chosen.head];
  try {
    const address = '#layer=' + head.layer + '&head=' + head.kvHead + '&step=' + chosen.step;
    history.replaceState(null, '', address);
  } catch { /* a page that may not: the view is not in its address */ }
}
let writing = 0;
function choose(change) {
  const otherHead = change.head !== undefined && change.head !== chosen.head;
  Object.assign(chosen, change);
  chosen.step = Math.min(Math.max(chosen.step, 0), lastStep);
  if (otherHead) mapIsOf = null;
  draw();
  clearTimeout(writing);  // browsers object to an address that changes with each move of a slider
  writing = setTimeout(writeAddress, 200);
}

// ---- small helpers of the document

function make(tag, content, settings = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) made.setAttribute(name, value);
  for (const part of [content ?? []].flat()) made.append(part);
  return made;
}
function draws(tag, settings, content) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(settings)) made.setAttribute(name, value);
  if (content !== undefined) made.append(content);
  return made;
}
function definitions(list, entries) {
  list.replaceChildren(...entries.map(([term, value, more]) => make('div', [
    make('dt', term), make('dd', more ? [value, make('small', more)] : value)])));
}
function swatch(colour) {
  const made = make('span', null, {class: 'swatch'});
  made.style.background = colour;
  return made;
}
const tip = element('tip');
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 8)) + 'px';
  tip.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + 'px';
}
const hideTip = () => { tip.hidden = true; };
