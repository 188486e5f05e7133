'use strict';
// Draws a recording (page.cpp writes it). Text of the model or the prompt reaches the page by
// textContent alone.

const element = (id) => document.getElementById(id);
const fail = (what) => {
  element('failure').textContent = 'This page could not be drawn: ' + what;
  element('failure').hidden = false;
};
window.addEventListener('error', (event) => fail(event.message));

const about = JSON.parse(element('recording').textContent);
const steps = about.steps;
const lastStep = steps.length - 1;

// ---- numbers

const whole = (n) => Math.round(n).toLocaleString('en-US');
function bytes(n) {
  if (n >= 1e9) return (n / 1e9).toFixed(2) + ' GB';
  if (n >= 1e6) return (n / 1e6).toFixed(2) + ' MB';
  if (n >= 1e3) return (n / 1e3).toFixed(1) + ' kB';
  return n + ' B';
}
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + ' %';
const plural = (n, one, many) => whole(n) + ' ' + (n === 1 ? one : many);
function range(low, high) {
  return low + 1 === high ? whole(low) : whole(low) + ' to ' + whole(high - 1);
}

// ---- what was recorded

const policyLabels = {
  full: 'every row',
  sink_recent: 'sinks and recent rows',
  head_budget: 'a budget of rows',
  chunk_retrieval: 'every row, few read',
};
const kinds = about.kinds.map((kind) => {
  const known = kind.policy in policyLabels;
  const label = (known ? policyLabels[kind.policy] : kind.policy) + (kind.bits > 0 ? ', ' + kind.bits + ' bits' : '');
  const colour = !known ? 'other' : kind.policy === 'full' && kind.bits > 0 ? 'quantized' : kind.policy;
  return {...kind, label, colour: 'var(--' + colour + ')'};
});

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const isBytes = typeof about.tokens === 'string';
const tokens = isBytes ? bytesOf(about.tokens) : about.tokens;
const rowCount = tokens.length;

// Each row as it is shown. A character of several bytes stands at the first of them.
const glyphs = (() => {
  if (!isBytes) return Array.from(tokens, (token) => token + ' ');
  const decoder = new TextDecoder('utf-8', {fatal: true});
  const shown = [];
  while (shown.length < rowCount) {
    const at = shown.length;
    const byte = tokens[at];
    if (byte === 10) shown.push('↵\n');
    else if (byte >= 32 && byte < 127) shown.push(String.fromCharCode(byte));
    else {
      const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
      let character = '·';
      try {
        if (length > 1) character = decoder.decode(Uint8Array.from(tokens.slice(at, at + length)));
      } catch { /* no UTF-8: a dot for the byte */ }
      shown.push(character);
      for (let i = 1; i < length && character !== '·'; ++i) shown.push('·');
    }
  }
  return shown;
})();
const inline = (row) => (isBytes ? glyphs[row].replace('\n', '') : glyphs[row].trim());
function quoted(row) {
  const text = inline(row);
  return text === ' ' ? 'a space' : text === '↵' ? 'a line end' : '“' + text + '”';
}

// heads[i]: kind, setting, bytes and bytesRead by step; until[row] and exactUntil[row] (null: rows are
// exact as long as they are kept): one more than the last step; reads[step]: how, runs, rows, levels.
const asNothing = 0, asKept = 1, asBeforeAndNew = 2;
const heads = (() => {
  const data = bytesOf(about.rows);
  let at = 0;
  const number = () => {
    for (let value = 0, scale = 1;; scale *= 128) {
      const byte = data[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  const untils = () => {
    const runs = number();
    if (runs === 0) return null;
    const until = new Uint16Array(rowCount);
    for (let run = 0, row = 0; run < runs; ++run) {
      const rows = number();
      until.fill(number(), row, row + rows);
      row += rows;
    }
    return until;
  };
  const read = () => {
    const how = data[at++];
    const runs = [];
    if (how === 3) {
      for (let left = number(), end = 0; left > 0; --left) {
        const first = end + number();
        end = first + number();
        runs.push([first, end]);
      }
    }
    const count = number();
    const rows = new Uint32Array(count);
    const levels = new Uint8Array(count);
    for (let i = 0, end = 0; i < count; ++i) {
      rows[i] = end + number();
      levels[i] = data[at++];
      end = rows[i] + 1;
    }
    return {how, runs, rows, levels};
  };
  return about.heads.map((head, index) => {
    const until = untils() ?? new Uint16Array(rowCount);
    const exactUntil = untils();
    const reads = steps.map(read);
    return {...head, kind: kinds[head.kind], index, until, exactUntil, reads,
            layer: Math.floor(index / about.kvHeads), place: index % about.kvHeads};
  });
})();
const nameOf = (head) => 'layer ' + head.layer + ', KV head ' + head.place;
const shareOf = (level) => (level / 255) ** 2;

// For each row of the text 0, or a sum of these.
const isKept = 1, isRead = 2, isCoarse = 4;
function rowsAt(head, step) {
  const {tokens: length} = steps[step];
  const state = new Uint8Array(rowCount);
  for (let row = 0; row < length; ++row) {
    if (head.until[row] > step) {
      state[row] = isKept;
      if (head.exactUntil && head.exactUntil[row] <= step) state[row] |= isCoarse;
    }
  }
  const {how, runs} = head.reads[step];
  const before = step === 0 ? 0 : steps[step - 1].tokens;
  for (let row = 0; row < length; ++row) {
    if (how === asKept ? head.until[row] > step
        : how === asBeforeAndNew && (row >= before || head.until[row] > step - 1)) {
      state[row] |= isRead;
    }
  }
  for (const [first, end] of runs) {
    for (let row = first; row < end; ++row) state[row] |= isRead;
  }
  return state;
}
const counted = (state, flag) => state.reduce((sum, s) => sum + ((s & flag) ? 1 : 0), 0);

// ---- what is chosen: in the address too, so that a view can be sent on

// At first the head and the new token that look farthest back, with most attention.
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
  const place = number('head', about.kvHeads);
  if (layer !== null && place !== null) chosen.head = layer * about.kvHeads + place;
  chosen.step = number('step', steps.length) ?? chosen.step;
}
function writeAddress() {
  const head = heads[chosen.head];
  try {
    history.replaceState(null, '', '#layer=' + head.layer + '&head=' + head.place + '&step=' + chosen.step);
  } catch { /* a page that may not: the view is not in its address */ }
}
let drawing = 0;
function choose(change) {
  const otherHead = change.head !== undefined && change.head !== chosen.head;
  Object.assign(chosen, change);
  chosen.step = Math.min(Math.max(chosen.step, 0), lastStep);
  if (otherHead) mapIsOf = null;
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(() => { draw(); writeAddress(); });
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

// ---- the top of the page

function drawFacts() {
  const made = rowCount - about.promptTokens;
  const facts = element('facts');
  const say = (...parts) => facts.append(...parts);
  say('plan ', make('b', about.plan), ' · model ', make('b', about.model), ' · ');
  say(plural(about.layers, 'layer', 'layers'), ' of ', plural(about.kvHeads, 'KV head', 'KV heads'));
  say(about.group > 1 ? ' (' + about.group + ' query heads each)' : '');
  say(', ' + about.headDim + ' channels, rows in bfloat16 · a prompt of ');
  say(plural(about.promptTokens, 'token', 'tokens'), ' and ' + plural(made, 'new one', 'new ones'));
  document.title = about.plan + ' · ' + about.model + ' · what each head keeps';
}

function stepText(step) {
  const {kind, tokens: length} = steps[step];
  if (kind === 'compress') return 'behind the prompt: heads with a budget drop rows';
  const next = length < rowCount ? ', next comes ' + quoted(length) : ', the last one';
  return (kind === 'prompt' ? 'prompt: ' : 'writes: ') + quoted(length - 1) + next;
}

function drawNow() {
  const {step} = chosen;
  element('step').value = step;
  element('step').setAttribute('aria-valuetext', 'step ' + (step + 1) + ', ' + stepText(step));
  element('now').replaceChildren(
    'Step ' + (step + 1) + ' of ' + steps.length + ' · ' + whole(steps[step].tokens) + ' of ' +
    whole(rowCount) + ' tokens', make('small', stepText(step)));
}

// ---- where a number of tokens stands from left to right, 0 to 1: new tokens, few beside a prompt, get
// a fifth of the width at least

const newTokens = rowCount - about.promptTokens;
const promptWidth = newTokens === 0 ? 1 : Math.min(0.8, about.promptTokens / rowCount);
const isStretched = newTokens > 0 && promptWidth < about.promptTokens / rowCount;
function across(length) {
  if (length <= about.promptTokens) return promptWidth * length / about.promptTokens;
  return promptWidth + (1 - promptWidth) * (length - about.promptTokens) / newTokens;
}

// ---- heads by layer

const headsBytes = (step) => heads.reduce((sum, head) => sum + head.bytes[step], 0);
const mostOfHead = Math.max(steps[lastStep].fullHead, ...heads.flatMap((head) => head.bytes));

function sparkline(head) {
  const width = 100;
  let path = 'M0 100';
  steps.forEach(({tokens: length}, step) => {
    path += 'L' + (width * across(length)).toFixed(2) + ' ' + (100 - 100 * head.bytes[step] / mostOfHead).toFixed(2);
  });
  const svg = draws('svg', {viewBox: '0 0 ' + width + ' 100', preserveAspectRatio: 'none', 'aria-hidden': 'true'});
  const area = draws('path', {d: path + 'V100Z'});
  area.style.fill = head.kind.colour;
  const ground = draws('rect', {width, height: 100, opacity: 0.16});
  ground.style.fill = head.kind.colour;
  svg.append(ground, area);
  return svg;
}

function aboutHead(head, step) {
  return nameOf(head) + '\n' + head.setting + '\n' + bytes(head.bytes[step]) + ' held, ' +
    percent(head.bytes[step] / steps[step].fullHead) + ' of a full head’s ' + bytes(steps[step].fullHead) +
    (steps[step].kind === 'compress' ? '' : '\n' + bytes(head.bytesRead[step]) + ' read for this token');
}

function makeGrid() {
  const grid = element('grid');
  const small = about.kvHeads > 8;
  grid.classList.toggle('small', small);
  grid.style.gridTemplateColumns = 'auto repeat(' + about.kvHeads + ', minmax(0, 1fr))';
  const top = make('div', make('span', '', {class: 'name', role: 'columnheader'}), {class: 'row', role: 'row'});
  for (let place = 0; place < about.kvHeads; ++place) {
    const name = small ? String(place) : 'KV head ' + place;
    top.append(make('span', name, {class: 'name top', role: 'columnheader'}));
  }
  grid.append(top);
  for (let layer = 0; layer < about.layers; ++layer) {
    const row = make('div', make('span', 'layer ' + layer, {class: 'name', role: 'rowheader'}), {class: 'row', role: 'row'});
    for (const head of heads.slice(layer * about.kvHeads, (layer + 1) * about.kvHeads)) {
      const cell = make('button', sparkline(head), {type: 'button', class: 'cell', role: 'gridcell'});
      head.bytesText = make('span', '', {class: 'bytes'});
      cell.append(head.bytesText);
      if (head.kind.bits > 0) cell.append(make('span', head.kind.bits + ' bits', {class: 'bits'}));
      const show = (x, y) => showTip(aboutHead(head, chosen.step), x, y);
      cell.addEventListener('click', () => choose({head: head.index}));
      cell.addEventListener('mousemove', (event) => show(event.clientX, event.clientY));
      cell.addEventListener('mouseleave', hideTip);
      cell.addEventListener('focus', () => {
        if (!cell.matches(':focus-visible')) return;
        const box = cell.getBoundingClientRect();
        show(box.left, box.bottom - 14);
      });
      cell.addEventListener('blur', hideTip);
      head.cell = cell;
      row.append(cell);
    }
    grid.append(row);
  }
  grid.addEventListener('keydown', (event) => {
    const from = heads.findIndex((head) => head.cell === document.activeElement);
    const move = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -about.kvHeads, ArrowDown: about.kvHeads}[event.key];
    if (from < 0 || move === undefined) return;
    event.preventDefault();
    const to = from + move;
    if (to < 0 || to >= heads.length) return;
    heads[to].cell.focus();
    choose({head: to});
  });
}

function drawGrid() {
  for (const head of heads) {
    const isChosen = head.index === chosen.head;
    head.cell.setAttribute('aria-selected', isChosen);
    head.cell.tabIndex = isChosen ? 0 : -1;
    head.cell.setAttribute('aria-label', aboutHead(head, chosen.step));
    head.bytesText.textContent = bytes(head.bytes[chosen.step]);
  }
  const {fullHead} = steps[chosen.step];
  const rows = kinds.map((kind) => {
    const own = heads.filter((head) => head.kind === kind);
    const held = own.reduce((sum, head) => sum + head.bytes[chosen.step], 0);
    return make('tr', [make('td', [swatch(kind.colour), kind.label]), make('td', whole(own.length)),
                       make('td', bytes(held)), make('td', percent(held / (own.length * fullHead)))]);
  });
  element('legend').tBodies[0].replaceChildren(...rows);
}

// ---- memory over the text

const chart = {width: 720, height: 310, left: 58, right: 12, top: 20, bottom: 36};
const mostBytes = 1.06 * Math.max(...steps.map((step) => Math.max(step.bytes, step.fullHead * heads.length)));
const chartX = (length) => chart.left + (chart.width - chart.left - chart.right) * across(length);
const chartY = (n) => chart.height - chart.bottom - (chart.height - chart.top - chart.bottom) * n / mostBytes;

// Round distances of about a quarter of `most`.
function tick(most) {
  const scale = 10 ** Math.floor(Math.log10(most / 4));
  return [1, 2, 5, 10].find((n) => n * scale * 5 >= most) * scale;
}

function makeChart() {
  const svg = draws('svg', {viewBox: '0 0 ' + chart.width + ' ' + chart.height, role: 'img',
                            'aria-label': 'Bytes of all heads over the tokens of the text, beside a full cache'});
  const bottom = chart.height - chart.bottom;
  const unit = mostBytes >= 1e9 ? [1e9, 'GB'] : mostBytes >= 1e6 ? [1e6, 'MB'] : [1e3, 'kB'];
  for (let n = 0, step = tick(mostBytes); n <= mostBytes; n += step) {
    svg.append(draws('line', {class: 'grid', x1: chart.left, x2: chart.width - chart.right, y1: chartY(n), y2: chartY(n)}),
               draws('text', {x: chart.left - 6, y: chartY(n) + 4, 'text-anchor': 'end'},
                     Number((n / unit[0]).toPrecision(3)) + ' ' + unit[1]));
  }
  const xLabel = (n, anchor = 'middle') => svg.append(
    draws('text', {x: chartX(n), y: bottom + 16, 'text-anchor': anchor}, whole(n)));
  const end = isStretched ? about.promptTokens : rowCount;
  for (let n = 0, step = Math.max(1, tick(end)); n <= 0.93 * end; n += step) xLabel(n);
  xLabel(end);
  if (isStretched) xLabel(rowCount, 'end');
  svg.append(draws('text', {x: (chartX(0) + chartX(end)) / 2, y: bottom + 32, 'text-anchor': 'middle'},
                   newTokens > 0 ? 'tokens of the prompt' : 'tokens'));
  if (isStretched) {
    svg.append(draws('text', {x: chart.width - chart.right, y: bottom + 32, 'text-anchor': 'end'}, 'and new ones, wider'));
  }
  // By policy, so that equal colours lie together; what is no head's (queries kept for votes) on top.
  const order = [...heads].sort((a, b) => a.kind.policy.localeCompare(b.kind.policy) || a.index - b.index);
  const below = steps.map(() => 0);
  const line = (values) => values.map((n, step) => chartX(steps[step].tokens).toFixed(1) + ' ' + chartY(n).toFixed(1));
  const band = (own, colour) => {
    const before = [chartX(0) + ' ' + chartY(0), ...line(below)];
    own.forEach((n, step) => { below[step] += n; });
    const path = draws('path', {class: 'band', d: 'M' + [chartX(0) + ' ' + chartY(0), ...line(below)].join('L') +
                                                     'L' + before.reverse().join('L') + 'Z'});
    path.style.fill = colour;
    if (chartY(0) - chartY(Math.max(...own)) < 6) path.style.stroke = 'none';  // thin: all would be line
    svg.append(path);
    return path;
  };
  for (const head of order) {
    head.band = band(head.bytes, head.kind.colour);
    head.band.addEventListener('click', () => choose({head: head.index}));
    head.band.addEventListener('mousemove', (event) => showTip(aboutHead(head, chosen.step), event.clientX, event.clientY));
    head.band.addEventListener('mouseleave', hideTip);
  }
  const others = steps.map((step, i) => step.bytes - headsBytes(i));
  if (Math.max(...others) > mostBytes / 400) {
    const path = band(others, 'var(--other)');
    path.setAttribute('class', 'band other');
    path.append(draws('title', {}, 'tentative rows, and queries kept for heads that vote by them'));
  }
  const total = steps.map((step) => step.bytes);
  const full = steps.map((step) => step.fullHead * heads.length);
  const start = chartX(0) + ' ' + chartY(0);
  svg.append(draws('path', {class: 'total-line', d: 'M' + [start, ...line(total)].join('L')}),
             draws('path', {class: 'full-line', d: 'M' + [start, ...line(full)].join('L')}));
  if (newTokens > 0) {
    const x = chartX(about.promptTokens);
    svg.append(draws('line', {class: 'prompt-end', x1: x, x2: x, y1: chart.top - 8, y2: bottom}));
  }
  chart.outline = draws('path', {class: 'outline'});
  chart.mark = draws('line', {class: 'mark', y1: chart.top - 8, y2: bottom});
  svg.append(chart.outline, chart.mark);
  const right = chart.width - chart.right - 4;
  svg.append(draws('text', {class: 'strong', x: right, y: Math.max(chartY(full[lastStep]) - 7, 12), 'text-anchor': 'end'},
                   'full cache ' + bytes(full[lastStep])));
  const highest = Math.max(...total.filter((_, step) => steps[step].kind === 'generate'), total[lastStep]);
  if (chartY(highest) - chartY(full[lastStep]) > 24) {
    svg.append(draws('text', {class: 'strong', x: right, y: chartY(highest) - 7, 'text-anchor': 'end'},
                     'this plan ' + bytes(total[lastStep])));
  }
  element('chart').append(svg);
}

function drawChart() {
  const {tokens: length, bytes: held, fullHead, kind} = steps[chosen.step];
  const x = chartX(length);
  chart.mark.setAttribute('x1', x);
  chart.mark.setAttribute('x2', x);
  chart.outline.setAttribute('d', heads[chosen.head].band.getAttribute('d'));
  const read = heads.reduce((sum, head) => sum + head.bytesRead[chosen.step], 0);
  const full = fullHead * heads.length;
  definitions(element('totals'), [
    ['the cache holds', bytes(held), percent(held / full) + ' of full'],
    ['a full cache', bytes(full), whole(length) + ' tokens'],
    ['this token reads', kind === 'compress' ? '–' : bytes(read), kind === 'compress' ? 'nothing is read' : 'of cached keys and values'],
  ]);
}

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
  canvas.setAttribute('aria-label', 'Rows kept and read by ' + nameOf(head) + ', at each of ' + steps.length +
                      ' steps; arrow keys up and down go through the steps');
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
      // A narrow line on a wide page: strong attention is drawn a little wider than its row.
      const reach = levels[i] >= 64 && columns > 400 ? 1 : 0;
      for (let x = Math.max(0, columnOf(row) - reach); x <= Math.min(columns - 1, columnOf(row) + reach); ++x) {
        most[x] = Math.max(most[x], levels[i]);
      }
    });
    for (let x = 0; x < columns; ++x) {
      let colour = column[x] & isRead ? ground.read : column[x] & isKept ? ground.kept : ground.none;
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
    key(ground.read, 'kept and read'), key(ground.kept, 'kept, not read'), key(ground.none, 'dropped, or yet to come'),
    key(mixed(ground.read, look, 0.8), 'attention: the deeper, the more'));
}

function makeMap() {
  const canvas = element('map');
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return {step: Math.min(lastStep, Math.max(0, Math.floor((event.clientY - box.top) / mapLine))),
            row: Math.min(rowCount - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * rowCount)))};
  };
  canvas.addEventListener('click', (event) => choose({step: place(event).step}));
  canvas.addEventListener('mousemove', (event) => {
    const {step, row} = place(event);
    showTip('step ' + (step + 1) + ', ' + stepText(step) + '\nrow ' + whole(row) + ', ' + quoted(row),
            event.clientX, event.clientY);
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

let shown = null;  // of the head and step on the page: state, and level by row
function aboutRow(row) {
  const state = shown.state[row];
  const level = shown.levels.get(row);
  const what = !(state & (isKept | isRead)) ? 'dropped'
    : ((state & isKept) ? 'kept' : 'dropped behind this step') + ((state & isRead) ? ', read' : ', not read') +
      ((state & isCoarse) ? ', in ' + heads[chosen.head].kind.bits + ' bits' : '');
  const attention = level !== undefined ? percent(shareOf(level), 2) + ' of the attention'
    : (state & isRead) ? 'under ' + percent(about.leastShown, 2) + ' of the attention' : '';
  const code = isBytes ? ', byte ' + tokens[row] : '';
  return 'row ' + whole(row) + ', ' + quoted(row) + code + '\n' + what + (attention ? '\n' + attention : '');
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
  const sample = (name, text) => {
    const box = make('i');
    box.style.background = {read: 'color-mix(in srgb, ' + head.kind.colour + ' 22%, transparent)', look: 'var(--look)'}[name] ?? 'none';
    if (name === 'kept') { box.style.borderWidth = '0 0 2px'; box.style.borderColor = head.kind.colour; }
    if (name === 'query') box.style.border = '2px solid var(--ink)';
    return make('span', [box, text]);
  };
  const keys = [sample('read', 'kept and read'), sample('kept', 'kept, not read'), sample('look', 'attention'), sample('query', 'the query’s token'),
                make('span', 'pale: dropped')];
  if (head.exactUntil) keys.push(make('span', [make('em', 'slanted'), ': in ' + head.kind.bits + ' bits']));
  element('text-keys').replaceChildren(...keys);
  element('query').textContent = kind === 'compress'
    ? 'behind the prompt, when heads with a budget have dropped rows; nothing is read'
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
  const lines = order.map((i) => {
    const row = rows[i];
    const share = shareOf(levels[i]);
    const bar = make('span', null, {class: 'share'});
    bar.style.width = Math.max(1, 50 * share / most) + 'px';
    const around = (from, to) => {
      let text = '';
      for (let at = Math.max(0, from); at < Math.min(to, length); ++at) text += isBytes ? inline(at) : glyphs[at];
      return text;
    };
    const reach = isBytes ? 14 : 2;
    const go = make('button', whole(row), {type: 'button', 'aria-label': 'Scroll the text to row ' + row});
    go.addEventListener('click', () => scrollToRow(row));
    return make('tr', [make('td', go), make('td', [bar, percent(share)]),
                       make('td', [around(row - reach, row), make('mark', inline(row)), around(row + 1, row + 1 + reach)])]);
  });
  element('top').tBodies[0].replaceChildren(...lines);
  const covered = levels.reduce((sum, level) => sum + shareOf(level), 0);
  element('covered').textContent = steps[chosen.step].kind === 'compress' ? 'Nothing is read at this step.'
    : plural(rows.length, 'row', 'rows') + ' with at least ' + percent(about.leastShown, 2) +
      (rows.length === 1 ? ' has ' : ' each have ') +
      percent(Math.min(covered, 1), 0) + ' of the attention' +
      (about.group > 1 ? ' (mean over the ' + about.group + ' query heads)' : '') + '.';
}

function drawHead() {
  const head = heads[chosen.head];
  const step = steps[chosen.step];
  const state = rowsAt(head, chosen.step);
  const {rows, levels} = head.reads[chosen.step];
  const byRow = new Map(Array.from(rows, (row, i) => [row, levels[i]]));
  const before = shown;
  shown = {head: head.index, step: chosen.step, state, levels: byRow};
  element('head-title').replaceChildren(swatch(head.kind.colour), 'Layer ' + head.layer + ', KV head ' + head.place + ' ',
                                        make('small', 'keeps ' + head.setting));
  const kept = counted(state, isKept);
  const read = counted(state, isRead);
  const coarse = counted(state, isCoarse);
  definitions(element('numbers'), [
    ['rows kept', whole(kept) + ' of ' + whole(step.tokens), percent(kept / step.tokens)],
    ...(head.exactUntil ? [['of these in ' + head.kind.bits + ' bits', whole(coarse), whole(kept - coarse) + ' exact']] : []),
    ['rows read', step.kind === 'compress' ? '–' : whole(read),
     step.kind === 'compress' ? 'nothing is read' : bytes(head.bytesRead[chosen.step]) + ' of cached rows'],
    ['held', bytes(head.bytes[chosen.step]), percent(head.bytes[chosen.step] / step.fullHead) + ' of a full head’s'],
  ]);
  drawMap(head);
  drawText(head, state, byRow);
  drawTop(head);
  if (before?.head !== shown.head || before?.step !== shown.step) {
    const most = rows.length > 0 ? rows[levels.indexOf(Math.max(...levels))] : step.tokens - 1;
    scrollToRow(most);
  }
}

// ---- the foot

function drawAbout() {
  const pieces = steps.filter((step) => step.kind === 'prompt').length;
  const say = (text) => element('about').append(make('li', text));
  say('A row is one token’s key and value in one KV head. The plan says what each head keeps and reads of them.');
  say('Sampled: the prompt was read in ' + plural(pieces, 'piece', 'pieces') + ' of ' +
      (about.piece === 1 ? 'one token' : 'up to ' + plural(about.piece, 'token', 'tokens')) +
      ', and each piece is a step: what its last token’s query read, and what was kept behind it. ' +
      'Of what follows the prompt every token is a step. As everywhere, a prompt reads all rows; heads that select do so at each new token.');
  say('Attention is the engine’s own, for the rows that the cache gave it' +
      (about.group > 1 ? ', as a mean over the ' + about.group + ' query heads that share a KV head' : '') +
      '; in 256 levels, and left out below ' + percent(about.leastShown, 2) + ' of a query’s.');
  say('Bytes held are whole pages of 64 rows, with summaries where heads select by them. Bytes read are those of cached keys and values; what a head reads to select is not among them, nor are the rows of the very piece or token. 1 MB is 1,000,000 bytes.');
  say('Keys: arrows go through the heads in their table, and through the steps on the slider and on the map. The address of the page names head and step.');
}

// ---- together

function draw() {
  drawNow();
  drawGrid();
  drawChart();
  drawHead();
  Object.assign(document.body.dataset, {heads: heads.length, steps: steps.length, rows: rowCount, step: chosen.step,
                                        layer: heads[chosen.head].layer, head: heads[chosen.head].place});
}

let playing = 0;
function play(on) {
  clearInterval(playing);
  element('play').setAttribute('aria-pressed', on);
  if (!on) return;
  if (chosen.step === lastStep) choose({step: 0});
  playing = setInterval(() => {
    choose({step: chosen.step + 1});
    if (chosen.step >= lastStep) play(false);
  }, 140);
}

readAddress();
drawFacts();
makeGrid();
makeChart();
makeMap();
makeText();
drawAbout();
element('step').max = lastStep;
element('step').addEventListener('input', (event) => { play(false); choose({step: Number(event.target.value)}); });
element('back').addEventListener('click', () => { play(false); choose({step: chosen.step - 1}); });
element('on').addEventListener('click', () => { play(false); choose({step: chosen.step + 1}); });
element('play').addEventListener('click', () => play(element('play').getAttribute('aria-pressed') !== 'true'));
const redraw = () => { mapIsOf = null; choose({}); };
addEventListener('resize', redraw);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
addEventListener('hashchange', () => { readAddress(); redraw(); });
draw();
document.body.dataset.drawn = 'true';
