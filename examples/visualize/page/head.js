// SPDX-License-Identifier: Apache-2.0
//
// One head: its rows step by step, the text as the head holds it, and where it attends.

// ---- the chosen head

function colours() {
  const probe = make('span');
  document.body.append(probe);
  const parsed = (colour) => {
    probe.style.color = colour;
    return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  };
  const result = {paper: parsed('var(--paper)'), look: parsed('var(--look)'),
                  tint: parsed(heads[chosen.head].kind.colour)};
  probe.remove();
  return result;
}
const mixed = (one, other, share) => one.map((c, i) => Math.round(c + (other[i] - c) * share));
const css = (colour) => 'rgb(' + colour.join(' ') + ')';

let mapIsOf = null;
const mapLine = Math.max(2, Math.min(9, Math.floor(380 / steps.length)));

function drawMap(head) {
  const canvas = element('map');
  canvas.style.height = mapLine * steps.length + 'px';
  const now = element('map-now');
  now.style.top = mapLine * chosen.step - 2 + 'px';
  now.style.height = mapLine + 4 + 'px';
  canvas.setAttribute('aria-label', 'Rows kept and read by ' + nameOf(head) + ', at each of ' +
                      steps.length + ' steps; arrow keys up and down go through the steps');
  const columns = Math.min(rowCount, Math.max(200, Math.round(canvas.parentElement.clientWidth)));
  if (mapIsOf === head.index && canvas.width === columns) return;
  mapIsOf = head.index;
  canvas.width = columns;
  canvas.height = steps.length;
  const {paper, look, tint} = colours();
  const ground = {none: paper, kept: mixed(paper, tint, 0.2), read: mixed(paper, tint, 0.5)};
  const image = canvas.getContext('2d').createImageData(columns, steps.length);
  const columnOf = (row) => Math.floor(row * columns / rowCount);
  for (let step = 0; step < steps.length; ++step) {
    const state = rowsAt(head, step);
    const column = new Uint8Array(columns);
    const most = new Uint8Array(columns);
    for (let row = 0; row < rowCount; ++row) column[columnOf(row)] |= state[row];
    const {rows, levels} = head.reads[step];
    rows.forEach((row, i) => {
      // On a wide page a row is a thin line, so strong attention is drawn a little wider than its
      // row.
      const reach = levels[i] >= 64 && columns > 400 ? 1 : 0;
      const first = Math.max(0, columnOf(row) - reach);
      const last = Math.min(columns - 1, columnOf(row) + reach);
      for (let x = first; x <= last; ++x) most[x] = Math.max(most[x], levels[i]);
    });
    for (let x = 0; x < columns; ++x) {
      let colour = ground[column[x] & isRead ? 'read' : column[x] & isKept ? 'kept' : 'none'];
      if (most[x] > 0) colour = mixed(colour, look, Math.min(1, 0.12 + 1.8 * most[x] / 255));
      image.data.set([...colour, 255], 4 * (step * columns + x));
    }
  }
  canvas.getContext('2d').putImageData(image, 0, 0);
  const key = (colour, text) => {
    const box = make('i');
    box.style.background = css(colour);
    return make('span', [box, text]);
  };
  element('map-about').replaceChildren(
    key(ground.read, 'kept and read'), key(ground.kept, 'kept, not read'),
    key(ground.none, 'dropped, or yet to come'),
    key(mixed(ground.read, look, 0.8), 'attention: the deeper, the more'));
}

function makeMap() {
  const canvas = element('map');
  const pointAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const within = (share, end) => Math.min(end - 1, Math.max(0, Math.floor(share * end)));
    return {step: within((event.clientY - box.top) / box.height, steps.length),
            row: within((event.clientX - box.left) / box.width, rowCount)};
  };
  canvas.addEventListener('click', (event) => choose({step: pointAt(event).step}));
  canvas.addEventListener('mousemove', (event) => {
    const {step, row} = pointAt(event);
    const text = 'step ' + (step + 1) + ', ' + stepText(step) + '\nrow ' + whole(row) + ', ' +
      quoted(row);
    showTip(text, event.clientX, event.clientY);
  });
  canvas.addEventListener('mouseleave', hideTip);
  canvas.addEventListener('keydown', (event) => {
    const move = {ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10}[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose({step: chosen.step + move});
  });
  for (let row = 0, step = Math.max(1, tick(rowCount)); row < 0.95 * rowCount; row += step) {
    const label = make('span', row === 0 ? 'row 0' : whole(row));
    label.style.left = 100 * row / rowCount + '%';
    element('map-axis').append(label);
  }
  element('map-axis').append(make('span', whole(rowCount - 1), {class: 'end'}));
}

const cells = [];
function makeText() {
  for (let row = 0; row < rowCount; ++row) {
    const cell = make('span', glyphs[row]);
    cell.dataset.row = row;
    cells.push(cell);
  }
  const text = element('text');
  text.append(...cells);
  text.addEventListener('mousemove', (event) => {
    const row = Number(event.target.dataset?.row ?? NaN);
    if (Number.isNaN(row)) return hideTip();
    showTip(aboutRow(row), event.clientX, event.clientY);
  });
  text.addEventListener('mouseleave', hideTip);
  text.addEventListener('scroll', hideTip);
}

let shown = null;  // what the page shows for this head and step: state and level of each row
function aboutRow(row) {
  const state = shown.state[row];
  const level = shown.levels.get(row);
  const bits = heads[chosen.head].kind.bits;
  const what = !(state & (isKept | isRead)) ? 'dropped'
    : (state & isKept ? 'kept' : 'dropped after this step') +
      (state & isRead ? ', read' : ', not read') + (state & isCoarse ? ', in ' + bits : '');
  const attention = level !== undefined ? percent(shareOf(level), 2) + ' of the attention'
    : state & isRead || heads[chosen.head].unread?.[chosen.step] ? 'under ' + percent(about.leastShown, 2) + ' of the attention' : '';
  return ['row ' + whole(row) + ', ' + quoted(row) + ', token ' + tokens[row], what, attention].join('\n').trim();
}

function drawText(head, state, levels) {
  const {tokens: length, kind} = steps[chosen.step];
  element('text').style.setProperty('--tint', head.kind.colour);
  cells.forEach((cell, row) => {
    let name = '';
    if (row >= length) name = 'later';
    else if (!(state[row] & (isKept | isRead))) name = 'gone';
    else {
      name = (state[row] & isRead) ? 'read' : 'kept';
      if (state[row] & isCoarse) name += ' coarse';
    }
    const level = levels.get(row);
    if (level !== undefined) {
      const share = Math.min(100, Math.round(8 + 160 * level / 255));
      name += ' seen' + (share > 55 ? ' strong' : '');
      cell.style.setProperty('--share', share + '%');
    }
    if (kind !== 'compress' && row === length - 1) name += ' query';
    if (cell.className !== name) cell.className = name;
  });
  const sample = (style, text) => {
    const box = make('i');
    Object.assign(box.style, style);
    return make('span', [box, text]);
  };
  const {colour, bits} = head.kind;
  const keys = [
    sample({background: 'color-mix(in srgb, ' + colour + ' 22%, transparent)'}, 'kept and read'),
    sample({border: 'solid ' + colour, borderWidth: '0 0 2px'}, 'kept, not read'),
    sample({background: 'var(--look)'}, 'attention'),
    sample({border: '2px solid var(--ink)'}, 'the query’s token'),
    make('span', 'pale: dropped'),
  ];
  if (head.exactUntil) keys.push(make('span', [make('em', 'slanted'), ': in ' + bits]));
  element('text-keys').replaceChildren(...keys);
  element('query').textContent = kind === 'compress'
    ? 'after the prompt, when heads with a budget have dropped rows; nothing is read'
    : 'when row ' + whole(length - 1) + ', ' + quoted(length - 1) + ', is read' +
      (length < rowCount ? ' and ' + quoted(length) + ' comes next' : '');
}

function scrollToRow(row) {
  const text = element('text');
  text.scrollTop = cells[row].offsetTop - text.offsetTop - text.clientHeight / 2;
}

function drawTop(head) {
  const {rows, levels} = head.reads[chosen.step];
  const order = Array.from(rows.keys()).sort((a, b) => levels[b] - levels[a]).slice(0, 8);
  const most = order.length > 0 ? shareOf(levels[order[0]]) : 1;
  const length = steps[chosen.step].tokens;
  const text = (from, to) => {
    let joined = '';
    for (let at = Math.max(0, from); at < Math.min(to, length); ++at) {
      joined += inline(at);
    }
    return joined;
  };
  const lines = order.map((i) => {
    const row = rows[i];
    const share = shareOf(levels[i]);
    const bar = make('span', null, {class: 'share'});
    bar.style.width = Math.max(1, 50 * share / most) + 'px';
    const go = make('button', whole(row), {type: 'button',
                                           'aria-label': 'Scroll the text to row ' + row});
    go.addEventListener('click', () => scrollToRow(row));
    const context = [text(row - around, row), make('mark', inline(row)),
                     text(row + 1, row + 1 + around)];
    const missed = shown.state[row] & isRead ? '' : ', not read';
    return make('tr', [make('td', go), make('td', [bar, percent(share) + missed]), make('td', context)]);
  });
  element('top').tBodies[0].replaceChildren(...lines);
  const covered = levels.reduce((sum, level) => sum + shareOf(level), 0);
  const mean = about.group > 1 ? ' (mean over the ' + about.group + ' query heads)' : '';
  element('covered').textContent = steps[chosen.step].kind === 'compress'
    ? 'Nothing is read at this step.'
    : plural(rows.length, 'row', 'rows') + ' with at least ' + percent(about.leastShown, 2) +
      (rows.length === 1 ? ' has ' : ' each have ') + percent(Math.min(covered, 1), 0) +
      ' of the attention' + mean + '.';
}

function drawHead() {
  const head = heads[chosen.head];
  const step = steps[chosen.step];
  const state = rowsAt(head, chosen.step);
  const {rows, levels} = head.reads[chosen.step];
  const byRow = new Map(Array.from(rows, (row, i) => [row, levels[i]]));
  const before = shown;
  shown = {head: head.index, step: chosen.step, state, levels: byRow};
  element('head-title').replaceChildren(
    swatch(head.kind.colour), 'Layer ' + head.layer + ', KV head ' + head.kvHead + ' ',
    make('small', 'keeps ' + head.setting));
  const kept = counted(state, isKept);
  const read = counted(state, isRead);
  const coarse = counted(state, isCoarse);
  const numbers = [
    ['rows kept', whole(kept) + ' of ' + whole(step.tokens), percent(kept / step.tokens)]];
  if (head.exactUntil) {
    const exact = whole(kept - coarse) + ' exact';
    numbers.push(['of these in ' + head.kind.bits, whole(coarse), exact]);
  }
  const held = head.bytes[chosen.step];
  numbers.push(
    step.kind === 'compress' ? ['rows read', '–', 'nothing is read']
      : ['rows read', whole(read), bytes(head.bytesRead[chosen.step]) + ' of cached rows'],
    ['held', bytes(held), percent(held / step.fullHead) + ' of a full head’s']);
  const unread = head.unread?.[chosen.step];
  if (unread) {
    const [bound, measured] = unread.map((millionths) => percent(millionths / 1e6, millionths < 1e4 ? 2 : 1));
    numbers.push(['attention left unread', measured, 'at most ' + bound + ' by the bound']);
  }
  definitions(element('numbers'), numbers);
  drawMap(head);
  drawText(head, state, byRow);
  drawTop(head);
  if (before?.head !== shown.head || before?.step !== shown.step) {
    const most = rows.length > 0 ? rows[levels.indexOf(Math.max(...levels))] : step.tokens - 1;
    scrollToRow(most);
  }
}
