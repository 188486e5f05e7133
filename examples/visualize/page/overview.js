// SPDX-License-Identifier: Apache-2.0
//
// The top of the page, the heads by layer, and memory over the text.

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
  if (kind === 'compress') return 'after the prompt: heads with a budget drop rows';
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

// ---- the horizontal position of a token count, 0 to 1. New tokens are few compared to a prompt,
// so they get at least a fifth of the width.

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
    const y = 100 - 100 * head.bytes[step] / mostOfHead;
    path += 'L' + (width * across(length)).toFixed(2) + ' ' + y.toFixed(2);
  });
  const svg = draws('svg', {viewBox: '0 0 ' + width + ' 100', preserveAspectRatio: 'none',
                            'aria-hidden': 'true'});
  const area = draws('path', {d: path + 'V100Z'});
  area.style.fill = head.kind.colour;
  const ground = draws('rect', {width, height: 100, opacity: 0.16});
  ground.style.fill = head.kind.colour;
  svg.append(ground, area);
  return svg;
}

function aboutHead(head, step) {
  const {fullHead, kind} = steps[step];
  const read = kind === 'compress' ? '' : '\n' + bytes(head.bytesRead[step]) + ' read for this token';
  return nameOf(head) + '\n' + head.setting + '\n' + bytes(head.bytes[step]) + ' held, ' +
    percent(head.bytes[step] / fullHead) + ' of a full head’s ' + bytes(fullHead) + read;
}

function makeCell(head) {
  const cell = make('button', sparkline(head), {type: 'button', class: 'cell', role: 'gridcell'});
  head.bytesText = make('span', '', {class: 'bytes'});
  cell.append(head.bytesText);
  if (head.kind.shortBits) cell.append(make('span', head.kind.shortBits, {class: 'bits'}));
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
  return cell;
}

function makeGrid() {
  const grid = element('grid');
  const narrow = about.kvHeads > 8;
  grid.classList.toggle('narrow', narrow);
  grid.classList.toggle('low', narrow || about.layers > 12);
  grid.style.gridTemplateColumns = 'auto repeat(' + about.kvHeads + ', minmax(0, 1fr))';
  const rowOf = (name, role) => make('div', make('span', name, {class: 'name', role}),
                                     {class: 'row', role: 'row'});
  const top = rowOf('', 'columnheader');
  for (let kvHead = 0; kvHead < about.kvHeads; ++kvHead) {
    const name = narrow ? String(kvHead) : 'KV head ' + kvHead;
    top.append(make('span', name, {class: 'name top', role: 'columnheader'}));
  }
  grid.append(top);
  for (let layer = 0; layer < about.layers; ++layer) {
    const row = rowOf('layer ' + layer, 'rowheader');
    for (const head of heads.slice(layer * about.kvHeads, (layer + 1) * about.kvHeads)) {
      row.append(makeCell(head));
    }
    grid.append(row);
  }
  grid.addEventListener('keydown', (event) => {
    const from = heads.findIndex((head) => head.cell === document.activeElement);
    const {kvHeads} = about;
    const moves = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -kvHeads, ArrowDown: kvHeads};
    const move = moves[event.key];
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
    const cells = [[swatch(kind.colour), kind.label], whole(own.length), bytes(held),
                   percent(held / (own.length * fullHead))];
    return make('tr', cells.map((content) => make('td', content)));
  });
  element('legend').tBodies[0].replaceChildren(...rows);
}

// ---- memory over the text

const fullBytes = steps.map((step) => step.fullHead * heads.length);
const totalBytes = steps.map((step) => step.bytes);
const mostBytes = 1.06 * Math.max(...fullBytes, ...totalBytes);
const chart = {width: 720, height: 310, left: 58, right: 708, top: 20, bottom: 274};
const chartX = (length) => chart.left + (chart.right - chart.left) * across(length);
const chartY = (n) => chart.bottom - (chart.bottom - chart.top) * n / mostBytes;
const chartPoint = (length, n) => chartX(length).toFixed(1) + ' ' + chartY(n).toFixed(1);
const chartLine = (values) => values.map((n, step) => chartPoint(steps[step].tokens, n));
const chartText = (x, y, anchor, text, name = '') =>
  draws('text', {x, y, 'text-anchor': anchor, class: name}, text);

// A round distance of about a quarter of `most`.
function tick(most) {
  const scale = 10 ** Math.floor(Math.log10(most / 4));
  return [1, 2, 5, 10].find((n) => n * scale * 5 >= most) * scale;
}

function chartAxes() {
  const made = [];
  const unit = mostBytes >= 1e9 ? [1e9, 'GB'] : mostBytes >= 1e6 ? [1e6, 'MB'] : [1e3, 'kB'];
  for (let n = 0, step = tick(mostBytes); n <= mostBytes; n += step) {
    const y = chartY(n);
    const label = Number((n / unit[0]).toPrecision(3)) + ' ' + unit[1];
    made.push(draws('line', {class: 'grid', x1: chart.left, x2: chart.right, y1: y, y2: y}),
              chartText(chart.left - 6, y + 4, 'end', label));
  }
  const under = chart.bottom + 16;
  const end = isStretched ? about.promptTokens : rowCount;
  for (let n = 0, step = Math.max(1, tick(end)); n <= 0.93 * end; n += step) {
    made.push(chartText(chartX(n), under, 'middle', whole(n)));
  }
  made.push(chartText(chartX(end), under, 'middle', whole(end)),
            chartText((chartX(0) + chartX(end)) / 2, under + 16, 'middle',
                      newTokens > 0 ? 'tokens of the prompt' : 'tokens'));
  if (isStretched) {
    made.push(chartText(chart.right, under, 'end', whole(rowCount)),
              chartText(chart.right, under + 16, 'end', 'and new ones, wider'));
  }
  return made;
}

// Heads of one policy are stacked next to each other, so that equal colours touch; what belongs to
// no head is on top.
function chartBands() {
  const below = steps.map(() => 0);
  const band = (own, colour) => {
    const start = chartPoint(0, 0);
    const before = [start, ...chartLine(below)];
    own.forEach((n, step) => { below[step] += n; });
    const outline = [start, ...chartLine(below), ...before.reverse()];
    const path = draws('path', {class: 'band', d: 'M' + outline.join('L') + 'Z'});
    path.style.fill = colour;
    // A thin band would show nothing but its outline.
    if (chartY(0) - chartY(Math.max(...own)) < 6) path.style.stroke = 'none';
    return path;
  };
  const byPolicy = [...heads].sort(
    (a, b) => a.kind.policy.localeCompare(b.kind.policy) || a.index - b.index);
  const made = byPolicy.map((head) => {
    head.band = band(head.bytes, head.kind.colour);
    head.band.addEventListener('click', () => choose({head: head.index}));
    head.band.addEventListener('mousemove', (event) =>
      showTip(aboutHead(head, chosen.step), event.clientX, event.clientY));
    head.band.addEventListener('mouseleave', hideTip);
    return head.band;
  });
  const others = totalBytes.map((total, step) => total - headsBytes(step));
  if (Math.max(...others) > mostBytes / 400) {
    const path = band(others, 'var(--other)');
    path.setAttribute('class', 'band other');
    path.append(draws('title', {}, 'queries kept for heads that rank rows by them, and the tail'));
    made.push(path);
  }
  return made;
}

function makeChart() {
  const svg = draws('svg', {
    viewBox: '0 0 ' + chart.width + ' ' + chart.height,
    role: 'img',
    'aria-label': 'Bytes of all heads over the tokens of the text, beside a full cache',
  });
  const line = (name, values) =>
    draws('path', {class: name, d: 'M' + [chartPoint(0, 0), ...chartLine(values)].join('L')});
  svg.append(...chartAxes(), ...chartBands(),
             line('total-line', totalBytes), line('full-line', fullBytes));
  const upright = {y1: chart.top - 8, y2: chart.bottom};
  if (newTokens > 0) {
    const x = chartX(about.promptTokens);
    svg.append(draws('line', {class: 'prompt-end', x1: x, x2: x, ...upright}));
  }
  chart.outline = draws('path', {class: 'outline'});
  chart.mark = draws('line', {class: 'mark', ...upright});
  svg.append(chart.outline, chart.mark);
  const full = chartY(fullBytes[lastStep]);
  const label = (y, text) => svg.append(chartText(chart.right - 4, y, 'end', text, 'strong'));
  label(Math.max(full - 7, 12), 'full cache ' + bytes(fullBytes[lastStep]));
  const written = totalBytes.filter((_, step) => steps[step].kind === 'generate');
  const total = chartY(Math.max(...written, totalBytes[lastStep]));
  if (total - full > 24) label(total - 7, 'this plan ' + bytes(totalBytes[lastStep]));
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
    kind === 'compress' ? ['this step reads', '–', 'heads drop rows']
      : ['this token reads', bytes(read), 'of cached keys and values'],
  ]);
}
